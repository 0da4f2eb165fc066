package gpu

// VerdictOf is the verdict on a whole host or pod, from the checks of all rows:
// "any F -> unfit; any R -> resetNeeded; any W beyond the plan's allowance ->
// degraded; a row that could not be answered and matters -> unproven; else
// pass". The sentence says what each class means, not which of the last two
// wins. Unproven does: a rollout goes on over a degraded host, and an unproven
// one must not become that by one warning more.
func VerdictOf(checks []Check, allowedWarnings int) Verdict {
	count := map[Severity]int{}
	unanswered := false
	for _, c := range checks {
		switch {
		case c.OK:
		case c.Skipped == "":
			count[c.Severity]++
		case c.Severity == Fatal || c.Severity == Reset:
			unanswered = true
		}
	}
	switch {
	case count[Fatal] > 0:
		return Unfit
	case count[Reset] > 0:
		return ResetNeeded
	case unanswered:
		return Unproven
	case count[Warn] > allowedWarnings:
		return Degraded
	}
	return Pass
}
