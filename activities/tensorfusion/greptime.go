package tensorfusion

import (
	"bufio"
	"context"
	"crypto/sha1"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// databaseLimit bounds dial, login and query together.
const databaseLimit = 15 * time.Second

// askDatabase proves that the GreptimeDB of the values answers a login and a
// query over its MySQL port, as the controller needs at its start (P02). A
// database with a Service in the cluster is reached through a pod behind it;
// any other is dialled from the worker.
func askDatabase(ctx context.Context, c *kube.Client, values map[string]any) Database {
	text := func(path string) string {
		v, ok := helm.GetPath(values, "greptime."+path)
		if !ok || v == nil {
			return ""
		}
		return fmt.Sprint(v)
	}
	host, port := text("host"), text("port")
	if host == "" || port == "" {
		return Database{}
	}
	db := Database{Address: net.JoinHostPort(host, port)}
	number, err := strconv.ParseFloat(port, 64)
	if err != nil {
		db.Trouble = "port " + port + " is not a number"
		return db
	}
	ctx, cancel := context.WithTimeout(ctx, databaseLimit)
	defer cancel()
	conn, side, err := dialDatabase(ctx, c, host, int(number))
	db.Side = side
	if err != nil {
		db.Trouble, db.Unseen = err.Error(), side == fromWorker
		return db
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		// A connection without deadlines is still ended by the context below.
		_ = conn.SetDeadline(deadline)
	}
	user, password := "", ""
	if text("isCloud") == "true" {
		user, password = text("user"), text("password")
	}
	if err := mysqlPing(conn, user, password, text("db")); err != nil {
		db.Trouble = err.Error()
	}
	return db
}

// Sides from which a database is asked.
const (
	fromCluster = "inside the cluster, at a pod of its Service"
	fromWorker  = "the worker; whether the controller's pods reach it shows at its restart"
)

func dialDatabase(ctx context.Context, c *kube.Client, host string, port int) (net.Conn, string, error) {
	name, namespace, inCluster := serviceOf(host)
	if !inCluster {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		return conn, fromWorker, err
	}
	svc, err := c.Typed.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fromCluster, kube.Wrap(err, "Service/"+namespace+"/"+name)
	}
	pods, err := c.Typed.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: labels.SelectorFromSet(svc.Spec.Selector).String()})
	if err != nil {
		return nil, fromCluster, kube.Wrap(err, "pods of Service/"+namespace+"/"+name)
	}
	for i := range pods.Items {
		if ready(&pods.Items[i]) {
			conn, err := c.DialPod(ctx, namespace, pods.Items[i].Name, port)
			return conn, fromCluster, err
		}
	}
	return nil, fromCluster, fmt.Errorf("Service/%s/%s has no Ready pod", namespace, name)
}

// serviceOf reads name.namespace.svc[.cluster.local].
func serviceOf(host string) (name, namespace string, ok bool) {
	parts := strings.Split(host, ".")
	if len(parts) >= 3 && parts[2] == "svc" {
		return parts[0], parts[1], true
	}
	return "", "", false
}

// MySQL protocol, the two exchanges that are needed here: a client library
// would bring far more than a login and one query.
const (
	clientConnectWithDB = 1 << 3
	clientProtocol41    = 1 << 9
	clientSecure        = 1 << 15
	clientPluginAuth    = 1 << 19
	nativePassword      = "mysql_native_password"
	commandQuery        = 0x03
	utf8mb4             = 45
	packetLimit         = 1 << 20
)

// mysqlPing logs in with mysql_native_password and sends SELECT 1.
func mysqlPing(conn net.Conn, user, password, database string) error {
	in := bufio.NewReader(conn)
	greeting, _, err := readPacket(in)
	if err != nil {
		return fmt.Errorf("greeting: %w", err)
	}
	salt, err := saltOf(greeting)
	if err != nil {
		return err
	}
	flags := uint32(clientProtocol41 | clientSecure | clientPluginAuth)
	if database != "" {
		flags |= clientConnectWithDB
	}
	login := binary.LittleEndian.AppendUint32(nil, flags)
	login = binary.LittleEndian.AppendUint32(login, packetLimit)
	login = append(login, utf8mb4)
	login = append(login, make([]byte, 23)...)
	login = append(append(login, user...), 0)
	proof := scramble(password, salt)
	login = append(append(login, byte(len(proof))), proof...)
	if database != "" {
		login = append(append(login, database...), 0)
	}
	login = append(append(login, nativePassword...), 0)
	if err := writePacket(conn, 1, login); err != nil {
		return fmt.Errorf("login: %w", err)
	}
	answer, seq, err := readPacket(in)
	if err != nil {
		return fmt.Errorf("login: %w", err)
	}
	if answer[0] == 0xfe { // the server asks for another method
		if len(answer) < 22 {
			return errors.New("login: the server asks for an authentication method that is not spoken here")
		}
		parts := strings.SplitN(string(answer[1:]), "\x00", 3)
		if parts[0] != nativePassword || len(parts) < 2 {
			return fmt.Errorf("login: the server asks for %s, which is not spoken here", parts[0])
		}
		if err := writePacket(conn, seq+1, scramble(password, []byte(parts[1]))); err != nil {
			return fmt.Errorf("login: %w", err)
		}
		if answer, _, err = readPacket(in); err != nil {
			return fmt.Errorf("login: %w", err)
		}
	}
	if err := refused(answer); err != nil {
		return fmt.Errorf("login: %w", err)
	}
	if err := writePacket(conn, 0, append([]byte{commandQuery}, "SELECT 1"...)); err != nil {
		return fmt.Errorf("query: %w", err)
	}
	if answer, _, err = readPacket(in); err == nil {
		err = refused(answer)
	}
	if err != nil {
		return fmt.Errorf("query: %w", err)
	}
	return nil
}

// saltOf takes both parts of the challenge out of a protocol 10 greeting.
func saltOf(greeting []byte) ([]byte, error) {
	if err := refused(greeting); err != nil {
		return nil, err
	}
	end := strings.IndexByte(string(greeting), 0)
	if greeting[0] != 10 || end < 0 || len(greeting) < end+13 {
		return nil, errors.New("the port does not speak the MySQL protocol")
	}
	salt := append([]byte(nil), greeting[end+5:end+13]...)
	// 8 bytes of salt, filler, flags, charset, status, flags, length, reserved.
	if rest := end + 13 + 1 + 2 + 1 + 2 + 2 + 1 + 10; len(greeting) >= rest+12 {
		salt = append(salt, greeting[rest:rest+12]...)
	}
	return salt, nil
}

// refused turns an ERR packet into an error.
func refused(packet []byte) error {
	if packet[0] != 0xff {
		return nil
	}
	if len(packet) < 3 {
		return errors.New("refused")
	}
	text := strings.TrimPrefix(string(packet[3:]), "#")
	return fmt.Errorf("refused with %d: %.200s", binary.LittleEndian.Uint16(packet[1:3]), text)
}

// scramble is SHA1(password) XOR SHA1(salt + SHA1(SHA1(password))).
func scramble(password string, salt []byte) []byte {
	if password == "" {
		return nil
	}
	if len(salt) > 20 {
		salt = salt[:20]
	}
	first := sha1.Sum([]byte(password))
	second := sha1.Sum(first[:])
	third := sha1.Sum(append(append([]byte(nil), salt...), second[:]...))
	out := make([]byte, len(first))
	for i := range first {
		out[i] = first[i] ^ third[i]
	}
	return out
}

func readPacket(r io.Reader) (payload []byte, seq byte, err error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, 0, err
	}
	size := int(head[0]) | int(head[1])<<8 | int(head[2])<<16
	if size == 0 || size > packetLimit {
		return nil, 0, fmt.Errorf("a packet of %d bytes", size)
	}
	payload = make([]byte, size)
	_, err = io.ReadFull(r, payload)
	return payload, head[3], err
}

func writePacket(w io.Writer, seq byte, payload []byte) error {
	size := len(payload)
	_, err := w.Write(append([]byte{byte(size), byte(size >> 8), byte(size >> 16), seq}, payload...))
	return err
}
