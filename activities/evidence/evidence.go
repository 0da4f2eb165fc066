// Package evidence keeps what an activity saw, as artifacts of its own for
// every try, and says how findings are shown in a result. It must not hold a
// secret: what goes in is readable by everybody who reads receipts.
package evidence

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"go.temporal.io/sdk/activity"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
)

// maxShown bounds the lists in a result; the artifact holds all.
const maxShown = 20

// Trail is what a result says of the answers behind it: where the last of
// them are kept, and how often the members were looked at.
type Trail struct {
	Looks int          `json:"looks"`
	Last  artifact.Ref `json:"last,omitzero"`
}

// Key is where an artifact of this try of the activity is kept: no try ever
// writes over what another one has seen (N128).
func Key(ctx context.Context, name string) string {
	if !activity.IsActivity(ctx) {
		return name
	}
	info := activity.GetInfo(ctx)
	return fmt.Sprintf("%s/%s/%s-%s-%d/%s", strings.ReplaceAll(info.WorkflowExecution.ID, "/", "_"), info.WorkflowExecution.RunID,
		info.ActivityType.Name, info.ActivityID, info.Attempt, name)
}

// Store keeps a value as an evidence artifact.
func Store(ctx context.Context, to *artifact.Store, name string, entries int, value any) (artifact.Ref, error) {
	data, err := json.MarshalIndent(value, "", " ")
	if err != nil {
		return artifact.Ref{}, err
	}
	return to.Put(ctx, Key(ctx, name), artifact.Evidence, entries, func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	})
}

// Shown cuts findings to what a result carries.
func Shown(fs []finding.Finding) []finding.Finding { return fs[:min(len(fs), maxShown)] }

// InWords is findings in one line, for heartbeats and notes.
func InWords(fs []finding.Finding) string {
	switch len(fs) {
	case 0:
		return ""
	case 1:
		return fs[0].String()
	}
	return fmt.Sprintf("%s (and %d more)", fs[0].String(), len(fs)-1)
}
