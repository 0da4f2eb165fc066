package control

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

type handler struct{ faults []FaultRequest }

func (h *handler) Status(context.Context) Status { return Status{Name: "demo", Ready: true, Nodes: 8} }

func (h *handler) Fault(_ context.Context, name string, args []string) error {
	if name == "nonsense" {
		return errors.New("fault nonsense: no such fault")
	}
	h.faults = append(h.faults, FaultRequest{Name: name, Args: args})
	return nil
}

func TestCommandsReachTheHandler(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	h := &handler{}
	s, err := Serve(socket, h)
	require.NoError(t, err)
	client := Dial(socket)
	status, err := client.Status(t.Context())
	require.NoError(t, err)
	require.Equal(t, Status{Name: "demo", Ready: true, Nodes: 8}, status)
	require.NoError(t, client.Fault(t.Context(), "gpu-fails", []string{"n0"}))
	require.Equal(t, []FaultRequest{{Name: "gpu-fails", Args: []string{"n0"}}}, h.faults)
	require.EqualError(t, client.Fault(t.Context(), "nonsense", nil), "fault nonsense: no such fault")
	s.Close()
	_, err = client.Status(t.Context())
	require.Error(t, err)
	require.NoFileExists(t, socket)
}

func TestSocketOfADeadDaemonIsReplaced(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	require.NoError(t, os.WriteFile(socket, nil, 0o600))
	s, err := Serve(socket, &handler{})
	require.NoError(t, err)
	defer s.Close()
	_, err = Dial(socket).Status(t.Context())
	require.NoError(t, err)
}
