package release

import (
	"encoding/json"
	"fmt"
	"slices"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/stage"
)

// rowsPerPage bounds the rows per host in one activity's input: Temporal takes
// 2 MiB, a row has up to 500 bytes, and bytes in JSON grow by a third.
const rowsPerPage = 2500

// Record is what is stored of a run as artifact and ConfigMap (contract 16).
type Record[Row any] struct {
	Run *stage.Run
	// Scope is that of the run's Lease; the ConfigMap goes into its namespace.
	Scope tensorfusion.Scope
	// Key is the folder of the run's artifacts.
	Key string
	// Receipt makes it, once the rows are stored and among the run's artifacts.
	Receipt func() any
	// Rows per host go into artifacts alone: a ConfigMap holds 1 MiB.
	Rows []Row
}

// Write runs tensorfusion.ReceiptActivity, in the way of its caller's moment.
type Write func(summary string, req tensorfusion.ReceiptRequest, out *tensorfusion.ReceiptResult) error

// Key is the folder of a run's artifacts and a part of object names: DNS-safe,
// unique per run, and the same again after a reset of the workflow.
func Key(ctx workflow.Context) string {
	info := workflow.GetInfo(ctx)
	if info.OriginalRunID == "" { // in the SDK's test suite
		return info.WorkflowExecution.RunID
	}
	return info.OriginalRunID
}

// Store stores the record; the rows of a big cluster go before it, page by
// page. All that was stored is among the run's artifacts.
func (r Record[Row]) Store(write Write) (tensorfusion.ReceiptResult, error) {
	var out tensorfusion.ReceiptResult
	req := tensorfusion.ReceiptRequest{Scope: r.Scope, Key: r.Key}
	var err error
	if len(r.Rows) > rowsPerPage {
		for part := range slices.Chunk(r.Rows, rowsPerPage) {
			page := req
			page.Page, page.Pages = len(req.Pages)+1, nil
			if page.Hosts, err = json.Marshal(part); err != nil {
				return out, err
			}
			var stored tensorfusion.ReceiptResult
			if err := write(fmt.Sprintf("store page %d of the rows per host", page.Page), page, &stored); err != nil {
				return out, err
			}
			r.Run.Artifact(stored.Hosts)
			req.Pages = append(req.Pages, stored.Hosts.URL)
		}
	} else if len(r.Rows) > 0 {
		if req.Hosts, err = json.Marshal(r.Rows); err != nil {
			return out, err
		}
	}
	if req.JSON, err = json.Marshal(r.Receipt()); err != nil {
		return out, err
	}
	if err := write("store the receipt", req, &out); err != nil {
		return out, err
	}
	if out.Hosts.URL != "" {
		r.Run.Artifact(out.Hosts)
	}
	r.Run.Artifact(out.Artifact)
	return out, nil
}

// Close stores the record at the run's end, when nobody may be there to answer.
// A record that can't be stored is still the workflow's result, so the run ends
// all the same.
func (r Record[Row]) Close(name string) {
	r.Run.Cleanup(name, "store the record of the run", func(ctx workflow.Context) error {
		_, err := r.Store(func(summary string, req tensorfusion.ReceiptRequest, out *tensorfusion.ReceiptResult) error {
			return Last(ctx, r.Scope.Target.Cluster, tensorfusion.ReceiptActivity, summary, req, out)
		})
		if err != nil {
			r.Run.Warn("the receipt is this run's result and nothing else, it could not be stored: " + stage.Explain(err).Found)
		}
		return err
	})
}
