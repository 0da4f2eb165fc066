// Command refit is what a person types: plan, start, watch, approve.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	_ "github.com/refit-run/refit/activities/artifact/cloud"
	"github.com/refit-run/refit/starter/cli"
	"github.com/refit-run/refit/starter/planfile/schema"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := cli.Main(ctx, cli.App{
		Kinds:  schema.Kinds(),
		In:     os.Stdin,
		Out:    os.Stdout,
		Err:    os.Stderr,
		Getenv: os.Getenv,
		Size: func() (int, int) {
			w, h, err := term.GetSize(int(os.Stdout.Fd()))
			if err != nil {
				return 0, 0
			}
			return w, h
		},
	}, os.Args[1:])
	stop()
	os.Exit(code)
}
