package e2e

import (
	"context"
	"net"
	"strings"

	"github.com/stretchr/testify/require"
	"go.temporal.io/api/operatorservice/v1"
	"go.temporal.io/api/proxy"
	"go.temporal.io/api/workflowservice/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// boundaries stands between a worker and Temporal: it stops each task with which
// a stage begins on its way to the worker, until the test has done what it
// wants there. Asking the server from outside would miss a stage of half a
// second on a busy machine.
type boundaries struct {
	address string
	run     string
	// reached gets the stage whose first task is held; passed lets it go on.
	reached chan string
	passed  chan struct{}
}

// beginsWith are the activities of the run itself with which its stages begin,
// as far as no other stage has them.
var beginsWith = map[string]string{
	"lease.Acquire": "lock", "tensorfusion.Preflight": "preflight", "tensorfusion.Diff": "plan", "tensorfusion.Hold": "hold",
	"tensorfusion.Backup": "backup", "tensorfusion.ApplyCRDs": "crds", "tensorfusion.UpgradeRelease": "helm",
	"tensorfusion.SetPolicy": "policy", "tensorfusion.Verify": "verify", "tensorfusion.WriteReceipt": "receipt", "lease.Release": "unlock",
}

// messageLimit is Temporal's own for what a worker receives.
const messageLimit = 128 << 20

// hold opens such a way to Temporal for the tasks of the run with that ID.
func (w *world) hold(run string) *boundaries {
	w.t.Helper()
	b := &boundaries{run: run, reached: make(chan string), passed: make(chan struct{})}
	conn, err := grpc.NewClient(w.vars["TEMPORAL_ADDRESS"], grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(messageLimit)))
	require.NoError(w.t, err)
	w.t.Cleanup(func() { conn.Close() })
	service, err := proxy.NewWorkflowServiceProxyServer(proxy.WorkflowServiceProxyOptions{Client: workflowservice.NewWorkflowServiceClient(conn)})
	require.NoError(w.t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w.t, err)
	b.address = listener.Addr().String()
	server := grpc.NewServer(grpc.UnaryInterceptor(b.intercept), grpc.MaxRecvMsgSize(messageLimit))
	workflowservice.RegisterWorkflowServiceServer(server, service)
	operatorservice.RegisterOperatorServiceServer(server, operator{client: operatorservice.NewOperatorServiceClient(conn)})
	go server.Serve(listener)
	w.t.Cleanup(server.Stop)
	return b
}

func (b *boundaries) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	out, err := handle(ctx, req)
	if stage := b.stageOf(out); err == nil && stage != "" {
		select {
		case b.reached <- stage:
			<-b.passed
		case <-ctx.Done(): // the worker died of something else: the task comes again
		}
	}
	return out, err
}

// stageOf names the stage that begins with a task, "" when none does. It may
// name it for later tasks of the stage, too.
func (b *boundaries) stageOf(task any) string {
	switch t := task.(type) {
	case *workflowservice.PollActivityTaskQueueResponse:
		switch id, activity := t.GetWorkflowExecution().GetWorkflowId(), t.GetActivityType().GetName(); {
		case id == b.run:
			return beginsWith[activity]
		case activity == "tensorfusion.ObservePool": // a rollout plans with it first
			return b.child(id) + ".plan"
		}
	case *workflowservice.PollWorkflowTaskQueueResponse:
		id := t.GetWorkflowExecution().GetWorkflowId()
		switch t.GetWorkflowType().GetName() {
		case "Rollout":
			return b.child(id)
		case "RolloutShard": // ...canary.1.1: the first shard of the first wave
			parts := strings.Split(b.child(id), ".")
			return strings.Join(parts[:len(parts)-2], ".")
		}
	}
	return ""
}

func (b *boundaries) child(id string) string { return strings.TrimPrefix(id, b.run+".") }

// operator passes on what a worker asks of this service.
type operator struct {
	operatorservice.UnimplementedOperatorServiceServer
	client operatorservice.OperatorServiceClient
}

func (o operator) ListSearchAttributes(ctx context.Context, r *operatorservice.ListSearchAttributesRequest) (*operatorservice.ListSearchAttributesResponse, error) {
	return o.client.ListSearchAttributes(ctx, r)
}
