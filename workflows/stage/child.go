package stage

import (
	"fmt"
	"slices"
	"strings"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
)

// maxAcked is how many acknowledgements a report repeats.
const maxAcked = 20

// child is a child run, live or closed, as its reports describe it.
type child struct {
	prefix string
	row    int
	future workflow.ChildWorkflowFuture
	closed bool
	// section: it is part of an unbreakable section of this run, so neither
	// pause nor abort goes down to it.
	section bool
	status  protocol.Status
	acked   []protocol.Ack
	outbox  []outgoing
}

type outgoing struct {
	verb   string
	answer protocol.Answer
}

// forwarded is an answer on its way to a child run.
type forwarded struct {
	to     *child
	id     string
	verb   string
	answer protocol.Answer
}

// reply returns the child's verdict ("" = accepted) once there is one. A run
// that closed without one has at least ended what the answer was about.
func (f forwarded) reply() (reason string, ok bool) {
	for _, a := range f.to.acked {
		if a.ID == f.id {
			return a.Reason, true
		}
	}
	if f.to.closed {
		return fmt.Sprintf("run %s closed before it acknowledged", f.to.prefix), true
	}
	return "", false
}

// waitings are the child's, named as in the parent's table.
func (c *child) waitings() []protocol.Waiting {
	var out []protocol.Waiting
	if w := c.status.WaitingFor; w != nil {
		out = append(out, *w)
	}
	out = append(out, c.status.AlsoWaiting...)
	for i := range out {
		out[i].Stage = c.prefix + "." + out[i].Stage
	}
	return out
}

// Child runs a child workflow that is itself a stage.Run: its stages, waits
// and progress appear in this run under prefix, answers go down to it. start
// starts it with the context and Parent given (the child is not cancelled
// with this run: it is told to abort, and waited for). result takes its
// result, or is nil. A child that was aborted by itself parks this stage.
func (s *Scope) Child(ctx workflow.Context, prefix string,
	start func(ctx workflow.Context, parent protocol.Parent) workflow.ChildWorkflowFuture, result any,
) error {
	r := s.run
	if err := s.Safe(ctx); err != nil {
		return err
	}
	c := &child{prefix: prefix, row: s.row, section: inSection(ctx)}
	r.children = slices.DeleteFunc(r.children, func(o *child) bool { return o.prefix == prefix && o.closed })
	r.children = append(r.children, c)
	detached, cancel := workflow.NewDisconnectedContext(ctx)
	defer cancel()
	exec := r.info.WorkflowExecution
	c.future = start(detached, protocol.Parent{WorkflowID: exec.ID, RunID: exec.RunID, Prefix: prefix})
	workflow.Go(detached, func(ctx workflow.Context) { c.send(ctx) })
	// An abort reaches the child when it is accepted; here its end is awaited.
	err := c.future.Get(detached, result)
	c.closed = true
	r.settlePending()
	r.changed()
	switch {
	case r.stopping != "" && !inSection(ctx):
		return ErrAborted
	case err != nil:
		return err
	case c.status.Phase == protocol.PhaseAborted:
		return Parking(fmt.Sprintf("the child run %s was aborted by itself", prefix),
			"what it had not reached is not done", "retry starts it again; abort ends this run too", nil)
	}
	return nil
}

// send delivers the outbox in order until the child has closed.
func (c *child) send(ctx workflow.Context) {
	for {
		if workflow.Await(ctx, func() bool { return len(c.outbox) > 0 || c.closed }) != nil || c.closed {
			return
		}
		next := c.outbox[0]
		c.outbox = c.outbox[1:]
		if err := c.future.SignalChildWorkflow(ctx, next.verb, next.answer).Get(ctx, nil); err != nil {
			c.acked = append(c.acked, protocol.Ack{ID: next.answer.ID, Reason: "not delivered to the child run: " + err.Error()})
		}
	}
}

func (r *Run) forward(c *child, verb string, a protocol.Answer) forwarded {
	r.sent++
	a.ID = fmt.Sprintf("%s/%d", r.info.WorkflowExecution.RunID, r.sent)
	c.outbox = append(c.outbox, outgoing{verb, a})
	return forwarded{to: c, id: a.ID, verb: verb, answer: a}
}

func (r *Run) forwardAll(verb string, a protocol.Answer) []forwarded {
	var out []forwarded
	for _, c := range r.children {
		if !c.closed && !c.section {
			a.Stage = ""
			out = append(out, r.forward(c, verb, a))
		}
	}
	return out
}

func (r *Run) forwardTo(stage, verb string, a protocol.Answer) []forwarded {
	for _, c := range r.children {
		if c.closed {
			continue
		}
		if local, ok := strings.CutPrefix(stage, c.prefix+"."); ok &&
			slices.ContainsFunc(c.waitings(), func(w protocol.Waiting) bool { return w.Stage == stage }) {
			a.Stage = local
			return []forwarded{r.forward(c, verb, a)}
		}
	}
	return nil
}

// merge takes a child's report.
func (r *Run) merge(rep protocol.Report) {
	for _, c := range r.children {
		if c.prefix != rep.Prefix || c.closed {
			continue
		}
		c.status = rep.Status
		for _, a := range rep.Acked {
			if !slices.ContainsFunc(c.acked, func(o protocol.Ack) bool { return o.ID == a.ID }) {
				c.acked = append(c.acked, a)
			}
		}
		r.settlePending()
		r.changed()
		return
	}
}

// settlePending records what a child refused of the answers that came by
// signal, whose senders do not wait.
func (r *Run) settlePending() {
	r.pending = slices.DeleteFunc(r.pending, func(f forwarded) bool {
		reason, ok := f.reply()
		if ok && reason != "" && !protocol.AddressesRun(f.verb) {
			f.answer.Stage = f.to.prefix + "." + f.answer.Stage
			r.ignore(f.verb, f.answer, reason)
		}
		return ok
	})
}

// acknowledge tells the parent with the next report.
func (r *Run) acknowledge(id, reason string) {
	r.acked = append(r.acked, protocol.Ack{ID: id, Reason: reason})
	if n := len(r.acked); n > maxAcked {
		r.acked = slices.Clone(r.acked[n-maxAcked:])
	}
}
