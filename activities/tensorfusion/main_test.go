package tensorfusion

import (
	"os"
	"strings"
	"testing"

	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/internal/apiservertest"
)

// checkOffVariable switches checks off by row id, comma-separated: the
// coverage proof runs this binary once per row and requires that row's test
// to fail (design, contract 17).
const checkOffVariable = "REFIT_TEST_CHECK_OFF"

func TestMain(m *testing.M) {
	if helm.IsChild(os.Args) {
		os.Exit(helm.RunChild(os.Stdin, os.Stdout))
	}
	for row := range strings.SplitSeq(os.Getenv(checkOffVariable), ",") {
		if row != "" {
			disabled[row] = true
		}
	}
	os.Exit(apiservertest.Main(m))
}
