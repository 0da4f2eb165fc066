package openbao

import (
	"context"
	"encoding/json"
	"errors"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// overtaken is why a step has not begun that a survey had found right.
func overtaken(found []finding.Finding) string {
	return "the members were not whole and steady right before it: " + evidence.InWords(found)
}

// unbegun is the finding of an error that came before anything was changed.
type unbegun struct {
	finding.Finding
	Untouched bool `json:"untouched"`
}

// untouched marks an error that came before anything was changed. A later try
// does not know how far the one before has got, and marks nothing.
func untouched(ctx context.Context, err error) error {
	f, class, ok := finding.Of(err)
	if !ok || activity.IsActivity(ctx) && activity.GetInfo(ctx).Attempt > 1 {
		return err
	}
	return temporal.NewApplicationErrorWithOptions(f.String(), string(class), temporal.ApplicationErrorOptions{
		NonRetryable: class != finding.Retry, Details: []any{unbegun{Finding: f, Untouched: true}},
	})
}

// Untouched tells whether an error of Replace or StepDown says that nothing
// was changed. False proves nothing.
func Untouched(err error) bool {
	var app *temporal.ApplicationError
	if !errors.As(err, &app) || !app.HasDetails() {
		return false
	}
	var detail any // an error that has not crossed a boundary panics when it is asked for another type
	if app.Details(&detail) != nil {
		return false
	}
	text, err := json.Marshal(detail)
	var u unbegun
	return err == nil && json.Unmarshal(text, &u) == nil && u.Untouched
}
