#!/usr/bin/env bash
# Fetches Apache Cassandra's jars into a folder, with Maven and its own
# configuration. As root it installs a missing Java or Maven from Debian.
#
#   tools/cassandra.sh FOLDER
set -euo pipefail
folder=${1:?expected the folder to fill}
pom=$(cd "$(dirname "$0")/.." && pwd)/sandbox/procnode/cassandrad/pom.xml

# Cassandra 5.0 sets a security manager, which Java 18 and later refuse, and its
# flags are those of Java 17. The release is in the first line.
java_release() {
	java -version 2>&1 | sed -n '1s/.*"\(1\.\)\{0,1\}\([0-9]*\)[^"]*".*/\2/p'
}

need_java() {
	local release
	release=$(command -v java >/dev/null && java_release || true)
	[ "${release:-0}" != 17 ]
}

missing=()
if need_java; then missing+=(java); fi
if ! command -v mvn >/dev/null; then missing+=(maven); fi

if [ ${#missing[@]} -gt 0 ]; then
	if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
		echo "Cassandra needs a Java runtime of release 17 and Maven in PATH; missing: ${missing[*]}." >&2
		echo "Install them; on Debian, as root: apt-get install openjdk-17-jre-headless maven" >&2
		exit 1
	fi
	echo "installing what Cassandra needs: ${missing[*]}"
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]/#java/openjdk-17-jre-headless}" >/dev/null
	if need_java; then
		echo "expected java of release 17 in PATH, found another; choose it with update-alternatives --config java" >&2
		exit 1
	fi
fi

# Filled beside its place and moved there, so that a folder is whole or absent;
# what was prepared with other jars goes with them.
next=$folder.next
rm -rf "$next"
mkdir -p "$next"
mvn -q -B -f "$pom" dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$next/lib"
rm -rf "$folder"
mv "$next" "$folder"
