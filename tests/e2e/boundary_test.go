package e2e

import (
	"context"
	"net"
	"regexp"
	"strings"

	"github.com/stretchr/testify/require"
	enums "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/operatorservice/v1"
	"go.temporal.io/api/proxy"
	"go.temporal.io/api/workflowservice/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/refit-run/refit/activities/gpu"
)

// boundaries stands between a worker and Temporal: it holds each task with which
// a stage begins on its way to the worker, and each moment in the turn of a
// batch, until the test has done what it wants there. Asking the server from
// outside would miss a stage of half a second on a busy machine.
type boundaries struct {
	address string
	run     string
	// reached gets the name of what is held, a stage or a moment with the stage
	// of its batch; passed lets it go on, or loses it when it is false.
	reached chan string
	passed  chan bool
}

// Moments in the turn of a batch, in order.
const (
	baselineAsked   = "baseline asked for, batch "
	replaceNext     = "about to delete, batch "
	proofUntold     = "replaced and not yet told, batch "
	validationAsked = "validation asked for, batch "
	verdictUntold   = "validated and not yet told, batch "
)

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
	b := &boundaries{run: run, reached: make(chan string), passed: make(chan bool)}
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
	if at := b.telling(req); !b.pass(ctx, at) {
		return nil, status.Error(codes.Unavailable, "lost: "+at)
	}
	out, err := handle(ctx, req)
	if err == nil { // whether it passes or not: the server has it
		b.pass(ctx, b.asked(req))
		b.pass(ctx, b.stageOf(out))
	}
	return out, err
}

// pass holds what has a name. It reports whether to go on; a worker that died
// of something else meanwhile has lost it.
func (b *boundaries) pass(ctx context.Context, at string) bool {
	if at == "" {
		return true
	}
	select {
	case b.reached <- at:
		return <-b.passed
	case <-ctx.Done():
		return false
	}
}

// telling names the moment at which a worker tells a batch's progress and the
// server does not know it yet, "" when it is none.
func (b *boundaries) telling(request any) string {
	switch r := request.(type) {
	case *workflowservice.RespondActivityTaskCompletedRequest:
		// The other activities of a batch are its agents', who come another way.
		return named(proofUntold, b.batch(r.GetResourceId()))
	case *workflowservice.RespondWorkflowTaskCompletedRequest:
		for _, c := range r.GetCommands() {
			if c.GetCommandType() == enums.COMMAND_TYPE_COMPLETE_WORKFLOW_EXECUTION {
				return named(verdictUntold, b.batch(r.GetResourceId()))
			}
		}
	}
	return ""
}

// asked names the moment at which the agents of a batch were asked for
// something, "" when it is none.
func (b *boundaries) asked(request any) string {
	r, ok := request.(*workflowservice.RespondWorkflowTaskCompletedRequest)
	if !ok {
		return ""
	}
	for _, c := range r.GetCommands() {
		switch c.GetScheduleActivityTaskCommandAttributes().GetActivityType().GetName() {
		case gpu.BaselineActivity:
			return named(baselineAsked, b.batch(r.GetResourceId()))
		case gpu.ValidateActivity:
			return named(validationAsked, b.batch(r.GetResourceId()))
		}
	}
	return ""
}

func named(moment, batch string) string {
	if batch == "" {
		return ""
	}
	return moment + batch
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
		case activity == "tensorfusion.ReplaceHypervisors":
			return named(replaceNext, b.batch(id))
		}
	case *workflowservice.PollWorkflowTaskQueueResponse:
		id := t.GetWorkflowExecution().GetWorkflowId()
		switch t.GetWorkflowType().GetName() {
		case "Rollout":
			return b.child(id)
		case "RolloutShard":
			return b.batch(id)
		}
	}
	return ""
}

func (b *boundaries) child(id string) string { return strings.TrimPrefix(id, b.run+".") }

// shard is the run of a batch's hosts, such as ...canary.1.1: the first shard
// of the first wave.
var shard = regexp.MustCompile(`^(rollout\..+)\.\d+\.\d+$`)

// batch is the stage of the batch of which a run is a shard, "" when it is none.
// The run may be named as a worker's requests do it.
func (b *boundaries) batch(id string) string {
	if m := shard.FindStringSubmatch(b.child(strings.TrimPrefix(id, "workflow:"))); m != nil {
		return m[1]
	}
	return ""
}

// operator passes on what a worker asks of this service.
type operator struct {
	operatorservice.UnimplementedOperatorServiceServer
	client operatorservice.OperatorServiceClient
}

func (o operator) ListSearchAttributes(ctx context.Context, r *operatorservice.ListSearchAttributesRequest) (*operatorservice.ListSearchAttributesResponse, error) {
	return o.client.ListSearchAttributes(ctx, r)
}
