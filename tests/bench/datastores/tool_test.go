package datastores

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gocql/gocql"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/refit-run/refit/tests/sandbox"
)

// toolVariable names this program for the scripts: with it set, the program is
// the two command-line tools that machines with the tests may not have.
const toolVariable = "REFIT_BENCH_TOOL"

// toolLimit bounds one command.
const toolLimit = 2 * time.Minute

func TestMain(m *testing.M) {
	if os.Getenv(toolVariable) == "" || len(os.Args) < 2 || strings.HasPrefix(os.Args[1], "-test.") {
		os.Exit(m.Run())
	}
	if err := tool(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// tool is `cql ADDRESS STATEMENT`, as cqlsh with the administrator's password
// on its input, or `nats ADDRESS report|edit|info STREAM...` with the seed of
// an nkey there.
func tool(args []string) error {
	secret, err := bufio.NewReader(os.Stdin).ReadString('\n')
	if err != nil {
		return fmt.Errorf("the secret on standard input: %w", err)
	}
	secret = strings.TrimSpace(secret)
	switch {
	case len(args) == 3 && args[0] == "cql":
		return statement(args[1], secret, args[2])
	case len(args) >= 3 && args[0] == "nats":
		return streams(args[1], secret, args[2], args[3:])
	}
	return fmt.Errorf("expected cql ADDRESS STATEMENT or nats ADDRESS VERB, found %q", args)
}

// there leads every connection to one address.
type there string

func (a there) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(string(a), "9042"))
}

// statement runs one and prints its rows, a column of text each.
func statement(address, password, text string) error {
	db, err := sandbox.CQL(there(address), "cassandra", password)
	if err != nil {
		return err
	}
	defer db.Close()
	rows := db.Query(text).Consistency(gocql.One).Iter() // cqlsh's own
	for row := (map[string]any{}); rows.MapScan(row); row = map[string]any{} {
		for _, value := range row {
			fmt.Println(value)
		}
	}
	return rows.Close()
}

// streams does what the commands `nats stream` do.
func streams(address, seed, verb string, names []string) error {
	pair, err := nkeys.FromSeed([]byte(seed))
	if err != nil {
		return err
	}
	user, err := pair.PublicKey()
	if err != nil {
		return err
	}
	conn, err := nats.Connect("nats://"+net.JoinHostPort(address, "4222"), nats.Nkey(user, pair.Sign), nats.IgnoreDiscoveredServers())
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), toolLimit)
	defer cancel()
	if verb == "report" {
		list := js.ListStreams(ctx)
		for info := range list.Info() {
			fmt.Println(info.Config.Name, info.Config.Replicas)
		}
		return list.Err()
	}
	if len(names) == 0 {
		return errors.New("expected the name of a stream")
	}
	stream, err := js.Stream(ctx, names[0])
	if err != nil {
		return err
	}
	config := stream.CachedInfo().Config
	switch {
	case verb == "edit" && len(names) == 2:
		if config.Replicas, err = strconv.Atoi(names[1]); err != nil {
			return err
		}
		_, err = js.UpdateStream(ctx, config)
		return err
	case verb == "info":
		fmt.Println("Replicas:", config.Replicas)
		return nil
	}
	return fmt.Errorf("expected report, edit STREAM REPLICAS or info STREAM, found %q %q", verb, names)
}
