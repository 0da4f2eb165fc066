package run

import (
	"context"
	"errors"
	"fmt"
	"time"

	enumspb "go.temporal.io/api/enums/v1"
	namespacepb "go.temporal.io/api/namespace/v1"
	"go.temporal.io/api/operatorservice/v1"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/api/workflowservice/v1"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/refit-run/refit/workflows/protocol"
)

// attributes are the search attributes of every run, in the order created.
var attributes = []string{protocol.AttrCluster, protocol.AttrKind, protocol.AttrPhase, protocol.AttrWaitingFor}

// Setup creates the search attributes that are missing and returns their
// names; doing it twice is harmless.
func Setup(ctx context.Context, c *Connection) ([]string, error) {
	operator := c.OperatorService()
	existing, err := operator.ListSearchAttributes(ctx, &operatorservice.ListSearchAttributesRequest{Namespace: c.Namespace})
	if err != nil {
		return nil, fmt.Errorf("list search attributes of namespace %s at %s: %w; it needs a Temporal operator's rights", c.Namespace, c.Address, err)
	}
	missing := map[string]enumspb.IndexedValueType{}
	var created []string
	for _, name := range attributes {
		switch kind, ok := existing.CustomAttributes[name]; {
		case !ok:
			missing[name] = enumspb.INDEXED_VALUE_TYPE_KEYWORD
			created = append(created, name)
		case kind != enumspb.INDEXED_VALUE_TYPE_KEYWORD:
			return nil, fmt.Errorf("search attribute %s of namespace %s: expected type Keyword, found %s; remove it or use another namespace", name, c.Namespace, kind)
		}
	}
	if len(missing) == 0 {
		return nil, nil
	}
	_, err = operator.AddSearchAttributes(ctx, &operatorservice.AddSearchAttributesRequest{Namespace: c.Namespace, SearchAttributes: missing})
	var exists *serviceerror.AlreadyExists
	if err != nil && !errors.As(err, &exists) {
		return nil, fmt.Errorf("create search attributes %v in namespace %s: %w", created, c.Namespace, err)
	}
	return created, nil
}

// KeepReceipts is how long a server of our own keeps closed runs: its default
// of a day would lose the receipt over a weekend.
const KeepReceipts = 90 * 24 * time.Hour

// Retain makes the namespace keep closed runs at least that long.
func Retain(ctx context.Context, c *Connection, keep time.Duration) error {
	service := c.WorkflowService()
	found, err := service.DescribeNamespace(ctx, &workflowservice.DescribeNamespaceRequest{Namespace: c.Namespace})
	if err != nil {
		return fmt.Errorf("describe namespace %s at %s: %w", c.Namespace, c.Address, err)
	}
	if found.Config.GetWorkflowExecutionRetentionTtl().AsDuration() >= keep {
		return nil
	}
	_, err = service.UpdateNamespace(ctx, &workflowservice.UpdateNamespaceRequest{
		Namespace: c.Namespace,
		Config:    &namespacepb.NamespaceConfig{WorkflowExecutionRetentionTtl: durationpb.New(keep)},
	})
	if err != nil {
		return fmt.Errorf("keep closed runs of namespace %s for %s: %w", c.Namespace, keep, err)
	}
	return nil
}
