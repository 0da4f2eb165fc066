# Unseals the server beside it, again and again, as the chart's sidecar does.
# The chart waits a minute after its first attempt and then ten seconds each
# time, whatever came of it: a member can be Ready and sealed for 70 s. Here the
# file hold-unseal in the member's volume makes that last as long as it is
# there.
while :; do
  if [ -z "$UNSEAL_KEY" ]; then
    # The key is made after this container was started. The next start reads it.
    if bao status | grep -q '^Initialized  *true'; then
      sleep 2
      exit 1
    fi
  elif [ ! -e "$VOLUME_data/hold-unseal" ]; then
    bao operator unseal "$UNSEAL_KEY" >/dev/null && sleep "$UNSEAL_PAUSE"
  fi
  sleep 1
done
