package cli

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/starter/run"
	"github.com/refit-run/refit/starter/view"
)

func (a *App) artifactsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "artifacts",
		Short: "List and fetch what a run stored",
		Args:  exactly(0, "list or get"),
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.artifactsListCommand(), a.artifactsGetCommand())
	return c
}

// stored is what a run stored so far.
func stored(o run.Observation) []artifact.Ref {
	switch {
	case o.Receipt != nil && o.Receipt.Artifacts != nil:
		return o.Receipt.Artifacts
	case o.Status != nil && o.Status.Artifacts != nil:
		return o.Status.Artifacts
	}
	return []artifact.Ref{}
}

func (a *App) artifactsListCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "list [RUN]",
		Short:             "List a run's artifacts",
		Args:              atMost(1, "at most one run"),
		ValidArgsFunction: a.completeRuns,
		RunE: func(c *cobra.Command, args []string) error {
			_, refs, err := a.refs(c, first(args))
			if err != nil {
				return err
			}
			return a.print(refs, func(v view.Options) string {
				if len(refs) == 0 {
					return "nothing stored\n"
				}
				return view.Artifacts(refs, v)
			})
		},
	}
}

// refs reads the artifacts of the run named, or of the newest one.
func (a *App) refs(c *cobra.Command, id string) (string, []artifact.Ref, error) {
	ctx := c.Context()
	conn, err := a.connect(ctx)
	if err != nil {
		return "", nil, err
	}
	defer conn.Close()
	if id == "" {
		if id, err = newest(ctx, conn); err != nil {
			return "", nil, err
		}
	}
	o, err := run.Observe(ctx, conn, id)
	if err != nil {
		return "", nil, err
	}
	if o.Silent != "" {
		return "", nil, fmt.Errorf("artifacts of run %s: %s", id, o.Silent)
	}
	return id, stored(o), nil
}

func (a *App) artifactsGetCommand() *cobra.Command {
	var identity, file, id string
	c := &cobra.Command{
		Use:   "get NAME",
		Short: "Fetch one artifact, decrypted and checked against its digests",
		Args:  exactly(1, "one artifact of refit artifacts list"),
		RunE: func(c *cobra.Command, args []string) error {
			id, refs, err := a.refs(c, id)
			if err != nil {
				return err
			}
			ref, err := choose(id, refs, args[0])
			if err != nil {
				return err
			}
			return a.fetch(c, ref, identity, file)
		},
	}
	c.Flags().StringVar(&id, "run", "", "the run (default: the newest)")
	c.Flags().StringVar(&identity, "identity", "", "age identity file, needed for secret artifacts")
	c.Flags().StringVar(&file, "to", "-", "where to write it; - is standard output")
	return c
}

// choose finds an artifact by its name or by the name's last part.
func choose(id string, refs []artifact.Ref, name string) (artifact.Ref, error) {
	var found []artifact.Ref
	names := make([]string, len(refs))
	for i, r := range refs {
		names[i] = r.Name
		if r.Name == name {
			return r, nil
		}
		if strings.HasSuffix(r.Name, "/"+name) {
			found = append(found, r)
		}
	}
	if len(found) == 1 {
		return found[0], nil
	}
	return artifact.Ref{}, &run.Unknown{Reason: fmt.Sprintf("artifact %q of run %s: expected one of [%s], found %d that match", name, id, strings.Join(names, ", "), len(found))}
}

// fetch writes the artifact; a file appears only once both digests matched.
func (a *App) fetch(c *cobra.Command, ref artifact.Ref, identity, file string) error {
	base, ok := strings.CutSuffix(strings.TrimSuffix(ref.URL, ".age"), ref.Name)
	if !ok {
		return fmt.Errorf("artifact %s: its URL %s does not end with its name", ref.Name, ref.URL)
	}
	store, err := artifact.Open(base, nil)
	if err != nil {
		return err
	}
	defer store.Close()
	var key io.Reader
	if identity != "" {
		f, err := os.Open(identity)
		if err != nil {
			return usage{fmt.Errorf("age identity: %w", err)}
		}
		defer f.Close()
		key = f
	} else if ref.Kind == artifact.Secret {
		return usage{fmt.Errorf("artifact %s is encrypted: give --identity FILE of one of its recipients", ref.Name)}
	}
	if file == "-" {
		_, err := store.Get(c.Context(), ref.URL, key, a.Out)
		return err
	}
	// 0600: the plaintext may be a Secret.
	partial, err := os.OpenFile(file+".partial", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("write artifact: %w", err)
	}
	_, err = store.Get(c.Context(), ref.URL, key, partial)
	if closed := partial.Close(); err == nil {
		err = closed
	}
	if err != nil {
		_ = os.Remove(partial.Name())
		return err
	}
	if err := os.Rename(partial.Name(), file); err != nil {
		return fmt.Errorf("write artifact: %w", err)
	}
	a.say("%s written to %s, digests match", ref.Name, file)
	return nil
}
