package plan

// Status of one host within a rollout.
type Status string

const (
	// Waiting hosts are still to be done (the zero value).
	Waiting Status = ""
	// Unproven hosts were taken without a good outcome and are to be done
	// again. Unlike Waiting ones they are not settled by being seen on target:
	// a host that failed its validation looks like that too.
	Unproven Status = "unproven"
	// Proven hosts were replaced and validated by this rollout.
	Proven Status = "proven"
	// Already hosts came to be on target by themselves: that is progress.
	Already Status = "already"
	// Failed hosts were not proven, or broke after their proof.
	Failed Status = "failed"
	// Gone hosts left the pool.
	Gone Status = "gone"
	// Left hosts were given up by a person who skipped their batch.
	Left Status = "left"
)

// HostState is what the rollout knows of one host.
type HostState struct {
	Status Status `json:"status,omitempty"`
	// Why a host failed, in one line.
	Why string `json:"why,omitempty"`
	// Batch is the index of the batch in which it failed.
	Batch int `json:"batch,omitempty"`
}

// Step says how far the current batch is after its last wave.
type Step string

const (
	Replacing Step = ""
	Soaked    Step = "soaked"
	Rested    Step = "rested"
	Approved  Step = "approved"
)

// State of a rollout: plain data, carried through continue-as-new.
type State struct {
	// Batch is the index of the current batch.
	Batch int  `json:"batch"`
	Step  Step `json:"step,omitempty"`
	// Worked: a wave ran in the current batch, so there is something to soak.
	Worked bool `json:"worked,omitempty"`
	// Hosts of the batches that are no longer Waiting. It is only ever looked
	// up by name.
	Hosts map[string]HostState `json:"hosts,omitempty"`
}

func (s State) clone() State {
	hosts := make(map[string]HostState, len(s.Hosts))
	//workflowcheck:ignore a copy does not depend on the order
	for k, v := range s.Hosts {
		hosts[k] = v
	}
	s.Hosts = hosts
	return s
}

// Result is the outcome of one host of a wave.
type Result struct {
	Host   string
	Status Status // Proven, Already or Failed
	Why    string
}

// due reports whether a host of this status is to be taken.
func (s Status) due() bool { return s == Waiting || s == Unproven }

// After returns the state once the decision was carried out; results are those
// of a Replace decision. Its hosts without a result are to be taken again.
func (s State) After(d Decision, results []Result) State {
	s = s.clone()
	switch d.Kind {
	case Replace:
		s.Step, s.Worked = Replacing, true
		for _, h := range d.Hosts {
			s.Hosts[h] = HostState{Status: Unproven, Batch: s.Batch}
		}
		for _, r := range results {
			s.Hosts[r.Host] = HostState{Status: r.Status, Why: r.Why, Batch: s.Batch}
		}
	case Soak:
		s.Step = Soaked
	case Interval:
		s.Step = Rested
	case Gate:
		s.Step = Approved
	case Advance:
		s.Batch, s.Step, s.Worked = s.Batch+1, Replacing, false
	}
	return s
}

// Retry returns the state in which every failed host is to be done again, in
// the current batch: the answer of a person who repaired them.
func (s State) Retry(l Layout) State {
	s = s.clone()
	for _, h := range s.Failed(l) {
		s.Hosts[h] = HostState{Status: Unproven, Why: s.Hosts[h].Why}
	}
	s.Step = Replacing
	return s
}

// Leave returns the state in which the current batch is given up: what is not
// proven in it is left as it is and counts no longer.
func (s State) Leave(l Layout) State {
	s = s.clone()
	for _, h := range s.due(l) {
		s.Hosts[h] = HostState{Status: Left, Why: "batch skipped"}
	}
	for _, h := range s.Failed(l) {
		s.Hosts[h] = HostState{Status: Left, Why: s.Hosts[h].Why}
	}
	return s
}

// Failed lists the failed hosts in the layout's order.
func (s State) Failed(l Layout) []string {
	var out []string
	for _, b := range l.Batches {
		for _, h := range b.Hosts {
			if s.Hosts[h].Status == Failed {
				out = append(out, h)
			}
		}
	}
	return out
}

// Count returns how many hosts of the batches are settled well, and how many
// failed.
func (s State) Count(l Layout) (done, failed int) {
	for _, b := range l.Batches {
		for _, h := range b.Hosts {
			switch s.Hosts[h].Status {
			case Proven, Already, Gone, Left:
				done++
			case Failed:
				failed++
			}
		}
	}
	return done, failed
}

// due lists the hosts to take in the current batch and, after a retry, those
// of earlier ones; never of a later one.
func (s State) due(l Layout) []string {
	var out []string
	for i, b := range l.Batches {
		if i > s.Batch {
			break
		}
		for _, h := range b.Hosts {
			if s.Hosts[h].Status.due() {
				out = append(out, h)
			}
		}
	}
	return out
}

// ahead counts the waiting hosts of the batches after the current one.
func (s State) ahead(l Layout) int {
	n := 0
	for i := s.Batch + 1; i < len(l.Batches); i++ {
		for _, h := range l.Batches[i].Hosts {
			if s.Hosts[h].Status == Waiting {
				n++
			}
		}
	}
	return n
}

// take folds an observation into the state: hosts that came to be on target by
// themselves are done, proven hosts that broke have failed, hosts that left
// the pool are gone. It returns a line for each change. Hosts that were on
// target before the rollout are not judged: what happens to them is no verdict
// on it.
func (s State) take(l Layout, seen []Host) (State, []string) {
	if seen == nil {
		return s, nil
	}
	s = s.clone()
	byName := make(map[string]Host, len(seen))
	for _, h := range seen {
		byName[h.Name] = h
	}
	var notes []string
	for _, b := range l.Batches {
		for _, name := range b.Hosts {
			old := s.Hosts[name].Status
			h, there := byName[name]
			next, note := settle(old, h, there)
			if next.Status == old {
				continue
			}
			next.Batch = s.Batch
			s.Hosts[name] = next
			notes = append(notes, "host "+name+" "+note)
		}
	}
	return s, notes
}

// Unplanned lists the hosts that are neither on target nor part of the layout:
// they joined the pool after it was made.
func Unplanned(l Layout, seen []Host) []string {
	known := make(map[string]bool, len(seen))
	for _, h := range l.Done {
		known[h] = true
	}
	for _, b := range l.Batches {
		for _, h := range b.Hosts {
			known[h] = true
		}
	}
	var out []string
	for _, h := range seen {
		if !known[h.Name] && !h.done() {
			out = append(out, h.Name)
		}
	}
	return out
}

// settle decides what one host becomes when it is seen (or missing).
func settle(old Status, h Host, there bool) (HostState, string) {
	switch {
	case !there && (old.due() || old == Failed):
		return HostState{Status: Gone}, "left the pool"
	case !there:
	case old == Gone && h.done():
		return HostState{Status: Already}, "is back in the pool, on target"
	case old == Gone:
		return HostState{}, "is back in the pool"
	case old == Waiting && h.done():
		return HostState{Status: Already}, "is on target by itself"
	case (old == Proven || old == Already) && h.Broken != "":
		return HostState{Status: Failed, Why: "broke after it was on target: " + h.Broken}, "broke after it was on target: " + h.Broken
	case (old == Proven || old == Already) && !h.OnTarget:
		return HostState{Status: Failed, Why: "is no longer on target"}, "is no longer on target"
	}
	return HostState{Status: old}, ""
}
