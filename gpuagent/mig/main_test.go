package mig

import (
	"os"
	"testing"

	"github.com/refit-run/refit/gpuagent/child"
)

func TestMain(m *testing.M) {
	if child.Main() {
		return
	}
	os.Exit(m.Run())
}
