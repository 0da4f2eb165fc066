package cassandrad

import (
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/refit-run/refit/sandbox/procnode/environ"
	"github.com/refit-run/refit/sandbox/procnode/pod"
)

// jmxPort is on the pod's own address: Cassandra's local JMX would be on
// 127.0.0.1, which all pods share.
const jmxPort = 7199

// heap is in MB.
const heap = 256

// What Cassandra 5.0 needs of Java 17 (its own jvm17-server.options).
var modules = []string{
	"--add-exports=java.base/jdk.internal.misc=ALL-UNNAMED", "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
	"--add-exports=java.base/sun.nio.ch=ALL-UNNAMED", "--add-exports=java.management.rmi/com.sun.jmx.remote.internal.rmi=ALL-UNNAMED",
	"--add-exports=java.rmi/sun.rmi.registry=ALL-UNNAMED", "--add-exports=java.rmi/sun.rmi.server=ALL-UNNAMED",
	"--add-exports=java.rmi/sun.rmi.transport.tcp=ALL-UNNAMED", "--add-exports=java.sql/java.sql=ALL-UNNAMED",
	"--add-opens=java.base/java.lang.module=ALL-UNNAMED", "--add-opens=java.base/jdk.internal.loader=ALL-UNNAMED",
	"--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED", "--add-opens=java.base/jdk.internal.reflect=ALL-UNNAMED",
	"--add-opens=java.base/jdk.internal.math=ALL-UNNAMED", "--add-opens=java.base/jdk.internal.module=ALL-UNNAMED",
	"--add-opens=java.base/jdk.internal.util.jar=ALL-UNNAMED", "--add-opens=jdk.management/com.sun.management.internal=ALL-UNNAMED",
	"--add-opens=java.base/sun.nio.ch=ALL-UNNAMED", "--add-opens=java.base/java.io=ALL-UNNAMED",
	"--add-opens=java.base/java.lang=ALL-UNNAMED", "--add-opens=java.base/java.lang.reflect=ALL-UNNAMED",
	"--add-opens=java.base/java.util=ALL-UNNAMED", "--add-opens=java.base/java.util.concurrent=ALL-UNNAMED",
	"--add-opens=java.base/java.util.concurrent.atomic=ALL-UNNAMED", "--add-opens=java.base/java.nio=ALL-UNNAMED",
}

// names make Java ask the node's hosts file, and ask again: a pod comes back
// with a new address.
func (m member) names() []string {
	if m.hosts == "" {
		return nil
	}
	return []string{"-Djdk.net.hosts.file=" + m.hosts, "-Dsun.net.inetaddr.ttl=1", "-Dsun.net.inetaddr.negative.ttl=1"}
}

// server is the command line of the daemon.
func (h Home) server(m member) []string {
	line := []string{
		h.java, fmt.Sprintf("-Xms%dm", heap), fmt.Sprintf("-Xmx%dm", heap), "-Xss256k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
		"-XX:+ExitOnOutOfMemoryError", "-Djdk.attach.allowAttachSelf=true", "-Djava.net.preferIPv4Stack=true",
		"-Dcom.sun.management.jmxremote.host=" + m.ip, "-Djava.rmi.server.hostname=" + m.ip,
		"-Dcom.sun.management.jmxremote.port=" + strconv.Itoa(jmxPort), "-Dcom.sun.management.jmxremote.rmi.port=" + strconv.Itoa(jmxPort),
		"-Dcom.sun.management.jmxremote.authenticate=false", "-Dcom.sun.management.jmxremote.ssl=false",
		"-Dcassandra.config=file://" + m.file("cassandra.yaml"), "-Dlogback.configurationFile=" + m.file("logback.xml"),
		"-Dcassandra-rackdc.properties=file://" + m.file("cassandra-rackdc.properties"),
		"-Dcassandra.storagedir=" + m.data, "-Dcassandra.logdir=" + m.conf, "-Dcassandra-foreground=yes",
		// A small ring on one machine settles faster than the half minute that
		// is usual.
		"-Dcassandra.ring_delay_ms=4000", "-Dcassandra.superuser_setup_delay_ms=0", "-Dcassandra.skip_wait_for_gossip_to_settle=0",
	}
	line = append(append(line, modules...), m.names()...)
	return append(line, "-cp", h.classpath(), "org.apache.cassandra.service.CassandraDaemon")
}

func (h Home) classpath() string { return filepath.Join(h.dir, "lib", "*") }

// Tools makes the folder that goes before PATH in the containers: probes,
// people and Refit call nodetool by its name there. The server's address and
// configuration are those of the container that it is called in.
func (h Home) Tools(dir string) error {
	script := fmt.Sprintf(`java=$0 jars=$1; shift
exec "$java" -Xmx64m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djava.net.preferIPv4Stack=true \
 -Djdk.net.hosts.file="$%s" -Dlogback.configurationFile="$VOLUME_%s/logback-tools.xml" \
 -Dcassandra.config="file://$VOLUME_%[2]s/cassandra.yaml" -Dcassandra.storagedir="$VOLUME_%[3]s" \
 --add-opens=java.base/java.lang=ALL-UNNAMED --add-opens=java.base/java.io=ALL-UNNAMED --add-opens=java.base/sun.nio.ch=ALL-UNNAMED \
 --add-exports=java.base/jdk.internal.ref=ALL-UNNAMED -cp "$jars" org.apache.cassandra.tools.NodeTool -h "$%[4]s" -p %[5]d "$@"`,
		pod.HostsVariable, ConfVolume, DataVolume, pod.IPVariable, jmxPort)
	return environ.Script(dir, "nodetool", "/bin/sh", "-c", script, h.java, h.classpath())
}
