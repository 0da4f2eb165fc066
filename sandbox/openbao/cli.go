package openbao

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// cli is the part of bao that asks a server.
type cli struct {
	address, token string
	out            io.Writer
	client         http.Client
}

const (
	defaultAddress = "https://127.0.0.1:8200"
	cliLimit       = 60 * time.Second
)

func newCLI(out io.Writer) *cli {
	return &cli{
		address: first(env(os.Getenv, "ADDR"), defaultAddress), token: env(os.Getenv, "TOKEN"),
		out: out, client: http.Client{Timeout: cliLimit},
	}
}

// parse reads the flags that every such command has.
func (c *cli) parse(name string, args []string, define func(*flag.FlagSet)) (format string, rest []string, err error) {
	flags := flag.NewFlagSet("bao "+name, flag.ContinueOnError)
	flags.StringVar(&c.address, "address", c.address, "address of the server")
	flags.StringVar(&format, "format", "table", "table or json")
	if define != nil {
		define(flags)
	}
	err = flags.Parse(args)
	return format, flags.Args(), err
}

// call returns the reply's body; into is filled from it.
func (c *cli) call(ctx context.Context, method, path string, body, into any) ([]byte, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(c.address, "/")+path, bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	if c.token != "" {
		request.Header.Set("X-Vault-Token", c.token)
	}
	response, err := c.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	if response.StatusCode >= http.StatusMultipleChoices {
		return nil, fmt.Errorf("%s %s: code %d: %s", method, path, response.StatusCode, bytes.TrimSpace(text))
	}
	if into != nil {
		err = json.Unmarshal(text, into)
	}
	return text, err
}

// status ends with 0 when the server is unsealed and with 2 when it is not.
func (c *cli) status(ctx context.Context, args []string) error {
	format, _, err := c.parse("status", args, nil)
	if err != nil {
		return err
	}
	return c.printSeal(ctx, format, http.MethodGet, "/v1/sys/seal-status", nil, true)
}

// printSeal shows a seal status as the real command's table does, as far as
// scripts read it.
func (c *cli) printSeal(ctx context.Context, format, method, path string, body any, sealedFails bool) error {
	var a sealAnswer
	text, err := c.call(ctx, method, path, body, &a)
	if err != nil {
		return err
	}
	if format == "json" {
		_, err = c.out.Write(text)
	} else {
		_, err = fmt.Fprintf(c.out, "Key             Value\n---             -----\nSeal Type       %s\nInitialized     %t\nSealed          %t\n"+
			"Total Shares    %d\nThreshold       %d\nVersion         %s\nStorage Type    %s\nCluster ID      %s\n",
			a.Type, a.Initialized, a.Sealed, a.N, a.T, a.Version, a.StorageType, first(a.ClusterID, "n/a"))
	}
	if err == nil && sealedFails && a.Sealed {
		err = &ExitError{codeSealed, errors.New("the server is sealed")}
	}
	return err
}

func (c *cli) init(ctx context.Context, args []string) error {
	var asked initRequest
	format, _, err := c.parse("operator init", args, func(f *flag.FlagSet) {
		f.IntVar(&asked.Shares, "key-shares", 5, "number of keys")
		f.IntVar(&asked.Threshold, "key-threshold", 3, "how many of them unseal")
	})
	if err != nil {
		return err
	}
	var made initAnswer
	if _, err := c.call(ctx, http.MethodPut, "/v1/sys/init", asked, &made); err != nil {
		return err
	}
	if format != "json" {
		_, err := fmt.Fprintf(c.out, "Unseal Key 1: %s\n\nInitial Root Token: %s\n", made.KeysBase64[0], made.RootToken)
		return err
	}
	encoder := json.NewEncoder(c.out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(map[string]any{
		"unseal_keys_b64": made.KeysBase64, "unseal_keys_hex": made.Keys, "unseal_shares": asked.Shares, "unseal_threshold": asked.Threshold,
		"recovery_keys_b64": []string{}, "recovery_keys_hex": []string{}, "recovery_keys_shares": 0, "recovery_keys_threshold": 0,
		"root_token": made.RootToken,
	})
}

func (c *cli) unseal(ctx context.Context, args []string) error {
	format, rest, err := c.parse("operator unseal", args, nil)
	if err != nil {
		return err
	}
	if len(rest) != 1 || rest[0] == "" {
		return errors.New("operator unseal: expected the key as the only argument: this double asks nobody for it")
	}
	return c.printSeal(ctx, format, http.MethodPut, "/v1/sys/unseal", unsealRequest{Key: rest[0]}, false)
}

func (c *cli) stepDown(ctx context.Context, args []string) error {
	if _, _, err := c.parse("operator step-down", args, nil); err != nil {
		return err
	}
	if _, err := c.call(ctx, http.MethodPut, "/v1/sys/step-down", nil, nil); err != nil {
		return err
	}
	_, err := fmt.Fprintln(c.out, "Success! Stepped down:", c.address)
	return err
}

func (c *cli) snapshot(ctx context.Context, args []string) error {
	_, rest, err := c.parse("operator raft snapshot save", args, nil)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return errors.New("operator raft snapshot save: expected the file to write")
	}
	text, err := c.call(ctx, http.MethodGet, snapshotPath, nil, nil)
	if err != nil {
		return err
	}
	return os.WriteFile(rest[0], text, 0o600)
}
