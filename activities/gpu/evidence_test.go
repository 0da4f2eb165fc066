package gpu

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAResultKeepsWhatItsPassingRowsFoundEachTextOnce(t *testing.T) {
	failed := Check{Name: "VBIOS", Device: "GPU-1", Found: "97"}
	var r Result
	r.Take([]Check{
		{Name: "driver version", Found: "580", OK: true},
		{Name: "PCIe width", Device: "GPU-0", Found: "x16", OK: true},
		{Name: "PCIe width", Device: "GPU-1", Found: "x16", OK: true},
		{Name: "PCIe width", Device: "GPU-2", Found: "x8", OK: true},
		failed,
		{Name: "bandwidth", Device: "GPU-0", Found: "50 GB/s", OK: true},
	}, "bandwidth")
	require.Equal(t, Result{Checks: []Check{failed}, Passed: 5, Found: []Found{
		{Name: "driver version", Found: "580"}, {Name: "PCIe width", Found: "x16", Devices: 2}, {Name: "PCIe width", Found: "x8", Devices: 1},
	}}, r)
}
