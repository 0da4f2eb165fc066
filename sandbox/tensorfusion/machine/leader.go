package machine

import "time"

// Lease is the leader's lease. It is not released when its holder ends.
type Lease struct {
	Holder      string
	Acquired    time.Time
	Renewed     time.Time
	Transitions int32
}

// Elect renews the lease while its holder lives. When the holder is gone the
// lease must run out before the first candidate takes it; leads is false
// meanwhile.
func Elect(l Lease, candidates []string, duration time.Duration, now time.Time) (next Lease, leads bool) {
	for _, c := range candidates {
		if c == l.Holder {
			l.Renewed = now
			return l, true
		}
	}
	if len(candidates) == 0 || l.Holder != "" && now.Before(l.Renewed.Add(duration)) {
		return l, false
	}
	transitions := l.Transitions
	if l.Holder != "" {
		transitions++
	}
	return Lease{Holder: candidates[0], Acquired: now, Renewed: now, Transitions: transitions}, true
}
