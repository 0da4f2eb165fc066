package cli_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	commonpb "go.temporal.io/api/common/v1"
	"go.temporal.io/api/workflowservice/v1"
)

// signalAsTctl sends what tctl 1.18 sends for `workflow signal -i`: the input
// word as one payload with encoding json/plain.
func signalAsTctl(t *testing.T, id, name, input string) {
	t.Helper()
	_, err := world.client.WorkflowService().SignalWorkflowExecution(context.Background(), &workflowservice.SignalWorkflowExecutionRequest{
		Namespace:         "default",
		WorkflowExecution: &commonpb.WorkflowExecution{WorkflowId: id},
		SignalName:        name,
		Identity:          "tctl@test",
		Input: &commonpb.Payloads{Payloads: []*commonpb.Payload{{
			Metadata: map[string][]byte{"encoding": []byte("json/plain")}, Data: []byte(input),
		}}},
	})
	require.NoError(t, err)
}
