package stage_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

func TestAnnouncedStagesArePendingUntilTheyAreExecuted(t *testing.T) {
	w := newWorld(t, stage.Options{})
	w.stages = func(r *stage.Run) []stage.Stage {
		last := stage.Stage{Name: "last", Purpose: "end", Do: w.act("last", time.Hour)}
		first := stage.Stage{Name: "first", Do: func(ctx workflow.Context, s *stage.Scope) error {
			if err := w.act("first", time.Hour)(ctx, s); err != nil {
				return err
			}
			r.Announce(stage.Stage{Name: "first"}, stage.Stage{Name: "middle"}, last) // the middle one is known by now
			return w.act("first", time.Hour)(ctx, s)
		}}
		r.Announce(first, last)
		return []stage.Stage{first}
	}
	early, later := w.statusAt(time.Minute), w.statusAt(90*time.Minute)
	r := w.run()
	require.Equal(t, map[string]protocol.StageState{"first": protocol.Running, "last": protocol.Pending}, states(early.Stages))
	require.Equal(t, "end", early.Stages[1].Purpose)
	require.Len(t, later.Stages, 3)
	require.Equal(t, "middle", later.Stages[1].Name)
	require.Equal(t, map[string]protocol.StageState{"first": protocol.Done}, states(r.Stages), "what was not executed is not in the record")
}

func TestAnnouncedStagesVanishWithAnAbort(t *testing.T) {
	w := newWorld(t, stage.Options{})
	w.stages = func(r *stage.Run) []stage.Stage {
		first := stage.Stage{Name: "first", Do: w.act("first", time.Hour)}
		r.Announce(first, stage.Stage{Name: "last"})
		return []stage.Stage{first}
	}
	w.signalAt(time.Minute, protocol.Abort, protocol.Answer{})
	require.Equal(t, map[string]protocol.StageState{"first": protocol.Aborted}, states(w.run().Stages))
}
