package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	jptext "github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/agent"
	"github.com/refit-run/refit/gpuagent/setup"
)

func checkCommand() *cobra.Command {
	var level, baseline, expect, output string
	var deadline time.Duration
	var all bool
	c := &cobra.Command{
		Use:   "check",
		Short: "Validate every GPU of this host and give a verdict",
		Long: `Validate every GPU of this host: driver, health counters, links, MIG, kernel
log, and work that CUDA really runs. Nothing is changed.

quick is safe beside running work, standard needs idle GPUs, stress tests their
memory for minutes.

` + exitHelp,
		Args: cobra.NoArgs,
	}
	c.Flags().StringVar(&level, "level", string(gpu.Quick), "quick, standard or stress")
	c.Flags().StringVar(&baseline, "baseline", "", "file written by refit-gpuagent baseline, to compare with")
	c.Flags().StringVar(&expect, "expect", "", "file (YAML or JSON) with what is declared of this host: driver, gpus, nvlinks, mig, ...")
	c.Flags().DurationVar(&deadline, "deadline", 0, "when to give up (default: by level)")
	c.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	c.Flags().BoolVarP(&all, "all", "a", false, "show the rows that passed too")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if output != "table" && output != "json" {
			return failed(bad("--output: expected table or json, found %q", output))
		}
		node, err := nodeName()
		if err != nil {
			return failed(err)
		}
		req := gpu.ValidateRequest{Node: node, Level: gpu.Level(level), Deadline: deadline}
		if baseline != "" {
			if req.Baseline, err = readFile[gpu.Baseline](baseline); err != nil {
				return failed(err)
			}
		}
		if expect != "" {
			if req.Expect, err = readFile[gpu.Expect](expect); err != nil {
				return failed(err)
			}
		}
		checks, result, err := agent.New(node).Examine(c.Context(), req, func(string) {})
		if errors.Is(err, agent.ErrBadRequest) {
			return failed(badInput{err})
		}
		if err != nil {
			return failed(err)
		}
		if err := report(c.OutOrStdout(), output, all, checks, result); err != nil {
			return failed(err)
		}
		return verdictExit(result.Verdict)
	}
	return c
}

// readFile reads YAML or JSON and refuses keys that it does not know.
func readFile[T any](path string) (*T, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, bad("%w", err)
	}
	if len(bytes.TrimSpace(b)) == 0 {
		return nil, bad("read %s: expected YAML or JSON, found an empty file", path)
	}
	var out T
	if err := yaml.UnmarshalStrict(b, &out); err != nil {
		return nil, bad("read %s: %w", path, err)
	}
	return &out, nil
}

func verdictExit(v gpu.Verdict) error {
	code, known := map[gpu.Verdict]int{
		gpu.Pass: setup.ExitDone, gpu.Degraded: exitDegraded, gpu.ResetNeeded: exitResetNeeded, gpu.Unfit: exitUnfit, gpu.Unproven: exitUnproven,
	}[v]
	if !known {
		return failed(fmt.Errorf("unknown verdict %q", v))
	}
	if code == setup.ExitDone {
		return nil
	}
	return &setup.Exit{Code: code}
}

func report(w io.Writer, format string, all bool, checks []gpu.Check, result gpu.Result) error {
	for _, k := range checks {
		if k.OK {
			result.Passed++
		}
		if all || !k.OK {
			result.Checks = append(result.Checks, k)
		}
	}
	if format == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(result)
	}
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Format.Header = jptext.FormatDefault
	column := func(number, width int) table.ColumnConfig {
		return table.ColumnConfig{Number: number, WidthMax: width, WidthMaxEnforcer: jptext.WrapSoft}
	}
	t.SetColumnConfigs([]table.ColumnConfig{column(3, 44), column(4, 44), column(5, 60)})
	t.AppendHeader(table.Row{"check", "device", "expected", "found", "hint", "result"})
	skipped := 0
	for _, k := range result.Checks {
		outcome := string(k.Severity)
		found := k.Found
		switch {
		case k.OK:
			outcome = "ok"
		case k.Skipped != "":
			skipped++
			found = k.Skipped
			outcome = "skipped"
			if k.Severity == gpu.Fatal || k.Severity == gpu.Reset {
				outcome = "unproven"
			}
			if !all && outcome == "skipped" {
				continue
			}
		}
		t.AppendRow(table.Row{k.Name, k.Device, k.Expected, found, k.Hint, outcome})
	}
	var b strings.Builder
	if t.Length() > 0 {
		b.WriteString(t.Render() + "\n")
	}
	fmt.Fprintf(&b, "node %s, driver %s, %d GPUs: %d checks passed, %d skipped (shown with --all)\n",
		result.Node, orNone(result.Driver), len(result.Devices), result.Passed, skipped)
	fmt.Fprintf(&b, "verdict: %s\n", result.Verdict)
	_, err := io.WriteString(w, b.String())
	return err
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func baselineCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "baseline",
		Short: "Print the state of this host's GPUs as JSON, to compare with after an upgrade",
		Long:  "Print the state of this host's GPUs as JSON, for check --baseline FILE.\n\n" + exitHelp,
		Args:  cobra.NoArgs,
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		node, err := nodeName()
		if err != nil {
			return failed(err)
		}
		b, err := agent.New(node).Record(c.Context(), gpu.BaselineRequest{Node: node})
		if err != nil {
			return failed(err)
		}
		e := json.NewEncoder(c.OutOrStdout())
		e.SetIndent("", "  ")
		if err := e.Encode(b); err != nil {
			return failed(fmt.Errorf("write the baseline: %w", err))
		}
		return nil
	}
	return c
}
