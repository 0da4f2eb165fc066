// Command pictures makes the documentation's pictures: what a program wrote on
// a terminal becomes an SVG file, a web page a PNG file.
//
//	go run ./tools/pictures terminal -title TEXT TERMINAL.txt PICTURE.svg
//	go run ./tools/pictures page -browser PROGRAM -until TEXT URL PICTURE.png
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"
)

var errUsage = errors.New("usage: pictures terminal [-title TEXT] TERMINAL.txt PICTURE.svg | pictures page [-browser PROGRAM] [-until TEXT] [-size WxH] URL PICTURE.png")

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pictures:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	set := flag.NewFlagSet("pictures "+args[0], flag.ContinueOnError)
	switch args[0] {
	case "terminal":
		title := set.String("title", "refit", "text of the window's title bar")
		if err := set.Parse(args[1:]); err != nil || set.NArg() != 2 {
			return errUsage
		}
		return terminal(set.Arg(0), set.Arg(1), *title)
	case "page":
		program := set.String("browser", "chromium", "a Chromium")
		size := set.String("size", "1400x1200", "of the window")
		s := shot{limit: time.Minute}
		set.StringVar(&s.until, "until", "", "text that the page must show")
		if err := set.Parse(args[1:]); err != nil || set.NArg() != 2 {
			return errUsage
		}
		if _, err := fmt.Sscanf(*size, "%dx%d", &s.width, &s.height); err != nil {
			return fmt.Errorf("-size %s: want WIDTHxHEIGHT", *size)
		}
		s.url = set.Arg(0)
		png, err := photograph(ctx, *program, s)
		if err != nil {
			return err
		}
		return os.WriteFile(set.Arg(1), png, 0o644)
	}
	return errUsage
}

func terminal(source, out, title string) error {
	b, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	lines, err := screen(string(b))
	if err != nil {
		return fmt.Errorf("%s: %w", source, err)
	}
	return os.WriteFile(out, []byte(svg(lines, title)), 0o644)
}
