package sandbox

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/stretchr/testify/require"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
)

// recordVariable names the folder for recorded histories; tools/record-histories.sh
// sets it.
const recordVariable = "REFIT_TEST_RECORD"

// Record writes the history of a closed run and those of its children for
// tests/replay, into a folder of that name. It does nothing unless recordings
// are asked for.
func (s *Sandbox) Record(name, run string) {
	s.t.Helper()
	if os.Getenv(recordVariable) == "" {
		return
	}
	dir := filepath.Join(os.Getenv(recordVariable), name)
	require.NoError(s.t, os.MkdirAll(dir, 0o755))
	list, err := s.Temporal.ListWorkflow(context.Background(), &workflowservice.ListWorkflowExecutionsRequest{Namespace: client.DefaultNamespace, PageSize: 1000})
	require.NoError(s.t, err)
	n := 0
	for _, e := range list.Executions {
		if id := e.Execution.WorkflowId; id != run && !strings.HasPrefix(id, run+".") {
			continue
		}
		n++
		text := s.must("temporal", "workflow", "show", "-w", e.Execution.WorkflowId, "-r", e.Execution.RunId, "-o", "json")
		var packed bytes.Buffer
		w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
		require.NoError(s.t, err)
		_, err = w.Write([]byte(text))
		require.NoError(s.t, err)
		require.NoError(s.t, w.Close())
		file := filepath.Join(dir, fmt.Sprintf("%s.%d.json.gz", e.Execution.WorkflowId, n))
		require.NoError(s.t, os.WriteFile(file, packed.Bytes(), 0o644))
	}
	require.Positive(s.t, n, "no history of %s", run)
}
