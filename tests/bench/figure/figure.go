// Package figure writes the lines of a bench, which scripts read. It must not
// measure anything.
package figure

import (
	"fmt"
	"strconv"
)

// Met tells whether a value is within its goal; op is "<", "<=" or empty
// without a goal.
func Met(value float64, op string, goal float64) bool {
	switch op {
	case "<":
		return value < goal
	case "<=":
		return value <= goal
	}
	return true
}

// Line is one measured value with its goal, if it has one.
func Line(name string, value float64, unit, op string, goal float64) string {
	wanted, verdict := "none", "ok"
	if op != "" {
		wanted = op + " " + strconv.FormatFloat(goal, 'f', -1, 64)
	}
	if !Met(value, op, goal) {
		verdict = "miss"
	}
	return fmt.Sprintf("bench: %s %.2f %s (goal %s) %s", name, value, unit, wanted, verdict)
}
