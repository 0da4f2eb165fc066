package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"
	"go.temporal.io/sdk/converter"

	"github.com/refit-run/refit/activities/codec"
)

// codecPatience is how long a stopping codec server lets an answer finish.
const codecPatience = 2 * time.Second

func (a *App) codecCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "codec",
		Short: "Keys that encrypt what runs put into Temporal, and a server that shows it decrypted",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.codecKeyCommand(), a.codecServeCommand())
	return c
}

func (a *App) codecKeyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "key NAME",
		Short: "Print a new line for the key file (" + codec.Variable + "); put it first to encrypt with it from now on",
		Args:  exactly(1, "a name for the key, such as 2026-11"),
		RunE: func(_ *cobra.Command, args []string) error {
			line, err := codec.New(args[0])
			if err != nil {
				return usage{err}
			}
			fmt.Fprintln(a.Out, line)
			return nil
		},
	}
}

func (a *App) codecServeCommand() *cobra.Command {
	var address, origin string
	c := &cobra.Command{
		Use:   "serve",
		Short: "Decrypt for Temporal's web UI (its codec endpoint) and `temporal --codec-endpoint`, until Ctrl-C",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			keys, err := codec.FromEnv(a.Getenv)
			if err != nil {
				return err
			}
			if keys == nil {
				return usage{fmt.Errorf("no key file: name it in %s", codec.Variable)}
			}
			return a.serveCodec(c.Context(), keys, address, origin)
		},
	}
	c.Flags().StringVar(&address, "listen", "127.0.0.1:8081", "address to listen on; whoever reaches it reads every payload")
	c.Flags().StringVar(&origin, "origin", "", "address of the web UI that may ask, for example http://127.0.0.1:8233")
	return c
}

func (a *App) serveCodec(ctx context.Context, keys *codec.Keys, address, origin string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("codec server: %w; choose another --listen", err)
	}
	server := http.Server{Handler: allow(origin, converter.NewPayloadCodecHTTPHandler(keys)), ReadHeaderTimeout: codecPatience}
	go func() {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), codecPatience)
		defer cancel()
		_ = server.Shutdown(stop)
	}()
	fmt.Fprintf(a.Out, "decrypting at http://%s\n", l.Addr())
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("codec server: %w", err)
	}
	return nil
}

// allow lets the pages of one origin ask (CORS), as the web UI does.
func allow(origin string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if origin != "" && r.Header.Get("Origin") == origin {
			w.Header().Set("Access-Control-Allow-Origin", origin)
			w.Header().Set("Access-Control-Allow-Methods", "POST")
			w.Header().Set("Access-Control-Allow-Headers", "Content-Type, X-Namespace, Authorization")
			w.Header().Set("Vary", "Origin")
		}
		if r.Method == http.MethodOptions {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		next.ServeHTTP(w, r)
	})
}
