package nvml

import (
	"encoding/binary"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Field ids, by the published header.
const (
	fieldMemoryTemp     = gonvml.FI_DEV_MEMORY_TEMP
	fieldLinkCount      = gonvml.FI_DEV_NVLINK_LINK_COUNT
	fieldLinkReplay     = gonvml.FI_DEV_NVLINK_ERROR_DL_REPLAY
	fieldLinkRecovery   = gonvml.FI_DEV_NVLINK_ERROR_DL_RECOVERY
	fieldLinkCRC        = gonvml.FI_DEV_NVLINK_ERROR_DL_CRC
	fieldLinkSpeed      = gonvml.FI_DEV_NVLINK_GET_SPEED
	fieldRecoveryAction = gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION
	fieldPCIeFatal      = gonvml.FI_DEV_PCIE_COUNT_FATAL_ERROR
)

// Counters that only tell errors, summed: those of the PCIe link except the
// fatal ones, and of the C2C links. A GPU is judged by their growth, whatever
// the kind.
var (
	pcieErrorFields = []uint32{
		gonvml.FI_DEV_PCIE_L0_TO_RECOVERY_COUNTER,
		gonvml.FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS, gonvml.FI_DEV_PCIE_COUNT_NAKS_RECEIVED,
		gonvml.FI_DEV_PCIE_COUNT_RECEIVER_ERROR, gonvml.FI_DEV_PCIE_COUNT_BAD_TLP,
		gonvml.FI_DEV_PCIE_COUNT_NAKS_SENT, gonvml.FI_DEV_PCIE_COUNT_BAD_DLLP,
		gonvml.FI_DEV_PCIE_COUNT_NON_FATAL_ERROR, gonvml.FI_DEV_PCIE_COUNT_UNSUPPORTED_REQ,
		gonvml.FI_DEV_PCIE_COUNT_LCRC_ERROR, gonvml.FI_DEV_PCIE_COUNT_LANE_ERROR,
	}
	c2cErrorFields = []uint32{
		gonvml.FI_DEV_C2C_LINK_ERROR_INTR, gonvml.FI_DEV_C2C_LINK_ERROR_REPLAY, gonvml.FI_DEV_C2C_LINK_ERROR_REPLAY_B2B,
	}
)

const symbolFields = "nvmlDeviceGetFieldValues"

// field reads one field value; link is its scope.
func (d device) field(id uint32, link int) Reading[uint64] {
	return ask(d.library, d.scope, func() (uint64, gonvml.Return) {
		v := []gonvml.FieldValue{{FieldId: id, ScopeId: uint32(link)}}
		if ret := d.GetFieldValues(v); ret != gonvml.SUCCESS {
			return 0, ret
		}
		return number(v[0]), gonvml.Return(v[0].NvmlReturn)
	}, symbolFields)
}

// sum adds the fields that are answered; without one, the last reason stands.
func (d device) sum(ids []uint32) Reading[uint64] {
	var total Reading[uint64]
	answered := false
	for _, id := range ids {
		r := d.field(id, 0)
		if r.OK() {
			total, answered = Reading[uint64]{Value: total.Value + r.Value}, true
		} else if !answered {
			total = Reading[uint64]{Code: r.Code, Missing: r.Missing}
		}
	}
	return total
}

// number reads the union of a field value by its type; all are little-endian
// on the hosts NVIDIA supports.
func number(v gonvml.FieldValue) uint64 {
	switch gonvml.ValueType(v.ValueType) {
	case gonvml.VALUE_TYPE_UNSIGNED_INT, gonvml.VALUE_TYPE_SIGNED_INT:
		return uint64(binary.LittleEndian.Uint32(v.Value[:4]))
	case gonvml.VALUE_TYPE_UNSIGNED_SHORT:
		return uint64(binary.LittleEndian.Uint16(v.Value[:2]))
	default:
		return binary.LittleEndian.Uint64(v.Value[:])
	}
}
