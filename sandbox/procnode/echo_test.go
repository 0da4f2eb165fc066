package procnode_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/refit-run/refit/sandbox/openbao"
	"github.com/refit-run/refit/sandbox/procnode"
	"github.com/refit-run/refit/sandbox/procnode/cassandrad"
	"github.com/refit-run/refit/sandbox/procnode/natsd"
	"github.com/refit-run/refit/sandbox/procnode/pod"
)

// role makes the test binary be something else: the node, which can then be
// killed, or the server that the pods run.
const role = "REFIT_PROCNODE_TEST"

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "node":
		runNode()
	case "echo":
		echo()
	case "nats":
		if err := natsd.Run(os.Args[1:]); err != nil {
			log.Fatal(err)
		}
	case "openbao":
		baoProgram()
	case "cassandra":
		if err := cassandrad.Run(os.Args[1:]); err != nil {
			log.Fatal(err)
		}
	default:
		code := m.Run()
		if shared != nil {
			shared.stop()
		}
		os.Exit(code)
	}
}

func baoProgram() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	err := openbao.Program(ctx, os.Args[1:], os.Stdout)
	stop()
	var exit *openbao.ExitError
	if errors.As(err, &exit) {
		os.Exit(exit.Code)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func runNode() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	config, err := procnode.Load(os.Args[1])
	if err == nil {
		err = procnode.Run(ctx, config)
	}
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// echo serves HTTP at 8080 and sends back what it gets at 9000.
func echo() {
	ip := os.Getenv(pod.IPVariable)
	var unready atomic.Bool
	http.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		if unready.Load() {
			http.Error(w, "not ready", http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("/unready", func(_ http.ResponseWriter, r *http.Request) { unready.Store(r.FormValue("is") == "true") })
	http.HandleFunc("/crash", func(_ http.ResponseWriter, r *http.Request) {
		code, _ := strconv.Atoi(r.FormValue("code"))
		os.Exit(code)
	})
	l, err := net.Listen("tcp", ip+":9000")
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				log.Fatal(err)
			}
			go func() {
				_, _ = io.Copy(conn, conn)
				_ = conn.Close()
			}()
		}
	}()
	go func() { log.Fatal(http.ListenAndServe(ip+":8080", nil)) }()
	fmt.Println("up", os.Args[1:])
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	for range term {
		if os.Getenv("IGNORE_TERM") == "" {
			fmt.Println("bye")
			return
		}
	}
}
