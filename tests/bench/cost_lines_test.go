package bench

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestARequestWithSeveralAuditLinesCountsOnce(t *testing.T) {
	const log = `{"auditID":"1","verb":"watch","stage":"ResponseStarted","requestReceivedTimestamp":"2026-03-01T10:00:01.000000Z","user":{"username":"refit-worker"},"objectRef":{"resource":"pods"}}
{"auditID":"1","verb":"watch","stage":"ResponseComplete","requestReceivedTimestamp":"2026-03-01T10:00:01.000000Z","user":{"username":"refit-worker"},"objectRef":{"resource":"pods"}}
{"auditID":"2","verb":"delete","stage":"ResponseComplete","requestReceivedTimestamp":"2026-03-01T10:00:02.000000Z","user":{"username":"refit-worker"},"objectRef":{"resource":"pods"}}
{"auditID":"3","verb":"delete","stage":"ResponseComplete","requestReceivedTimestamp":"2026-03-01T10:00:02.000000Z","user":{"username":"admin"},"objectRef":{"resource":"pods","name":"refit-worker"}}
{"auditID":"4","verb":"get","stage":"ResponseComplete","requestReceivedTimestamp":"2026-03-01T10:00:09.000000Z","user":{"username":"refit-worker"}}
`
	from := time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)
	r, err := countRequests(strings.NewReader(log), "refit-worker", from, from.Add(5*time.Second))
	require.NoError(t, err)
	assert.Equal(t, requests{"watch pods": 1, "delete pods": 1}, r)
	assert.Equal(t, 2, r.total())
}

func TestAFigureIsOneLineWithItsGoal(t *testing.T) {
	assert.Equal(t, "bench: overhead 12.35 % (goal < 20) ok", figure{"overhead", 12.345, "%", "<", 20}.String())
	assert.Equal(t, "bench: back-after-kill 15.01 s (goal <= 15) miss", figure{"back-after-kill", 15.01, "s", "<=", 15}.String())
	assert.Equal(t, "bench: floor 150.00 s (goal none) ok", figure{"floor", 150, "s", "", 0}.String())
}
