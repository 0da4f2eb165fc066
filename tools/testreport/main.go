// Command testreport runs `go test` and prints what a person needs: the package
// lines, the output of what failed, every skipped test with its reason.
//
//	testreport [-strict] [-again] go test FLAGS -- PACKAGES
//
// A skip is a hole in the proof, so it fails the run when -strict is given,
// except for tests that are meant to be left out. Tests on real clocks and
// ports can fail once without a defect: with -again what failed is run once
// more, and passing then is printed as UNSTABLE, so that it is seen and mended.
// It must not know what any test is about.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
)

const usage = "usage: testreport [-strict] [-again] go test FLAGS -- PACKAGES"

func main() {
	var c command
	flag.BoolVar(&c.strict, "strict", false, "fail when a required test was skipped")
	flag.BoolVar(&c.again, "again", false, "run what failed once more; passing then is printed as UNSTABLE")
	flag.Usage = func() { fmt.Fprintln(flag.CommandLine.Output(), usage); flag.PrintDefaults() }
	flag.Parse()
	var err error
	if c.words, c.packages, err = split(flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := c.run(ctx, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// split parts the arguments into the words of the command and the packages:
// what is run again is the same command with other packages.
func split(args []string) (words, packages []string, err error) {
	at := slices.Index(args, "--")
	if at < 1 || at == len(args)-1 {
		return nil, nil, fmt.Errorf("expected a command, -- and packages, found %q; %s", args, usage)
	}
	return args[:at], args[at+1:], nil
}

// command is one call of `go test`; environment and folder are this process's.
type command struct {
	strict, again   bool
	words, packages []string
}

// run reports whether everything passed, at the second try if need be.
func (c command) run(ctx context.Context, out io.Writer) (bool, error) {
	r, err := c.test(ctx, out, nil, c.packages...)
	if err != nil || r.ok(c.strict) {
		return err == nil, err
	}
	if !c.again || !r.mayRunAgain(c.strict, out) || ctx.Err() != nil {
		return false, nil
	}
	all := true
	for _, f := range r.broken {
		fmt.Fprintf(out, "RUNNING AGAIN ONCE: %s\n", f)
		r, err := c.test(ctx, out, f.flags(), f.Package)
		if err != nil {
			return false, err
		}
		if !r.ok(c.strict) || !r.passedAll(f) {
			fmt.Fprintf(out, "FAILED TWICE: %s\n", f)
			all = false
			continue
		}
		fmt.Fprintf(out, "UNSTABLE: %s failed once and passed at the second try\n", f)
	}
	return all, nil
}

// test runs the command for the packages and reads its events.
func (c command) test(ctx context.Context, out io.Writer, flags []string, packages ...string) (*results, error) {
	args := slices.Concat(c.words[1:], []string{"-json"}, flags, packages)
	cmd := exec.CommandContext(ctx, c.words[0], args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stderr = os.Stderr
	events, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	r, err := read(events, out)
	if err != nil {
		_ = cmd.Cancel() // nobody reads its output any more
	}
	waited := cmd.Wait()
	if err != nil {
		return nil, err
	}
	var exit *exec.ExitError
	if waited != nil && !errors.As(waited, &exit) {
		return nil, waited
	}
	if waited != nil && len(r.broken) == 0 {
		fmt.Fprintf(out, "%q ended with %v and named no package that failed\n", cmd.Args, waited)
		r.failed++
	}
	r.summary(out, c.strict)
	return r, nil
}
