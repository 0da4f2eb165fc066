package nvml

import (
	"encoding/binary"
	"slices"

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
	fieldC2CCount       = gonvml.FI_DEV_C2C_LINK_COUNT
	fieldC2CStatus      = gonvml.FI_DEV_C2C_LINK_GET_STATUS
	fieldC2CBandwidth   = gonvml.FI_DEV_C2C_LINK_GET_MAX_BW

	// Limits in degrees of margin: below 0 is past the point where work slows.
	fieldLimitShutdown = gonvml.FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT
	fieldLimitSlowdown = gonvml.FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT
	fieldLimitMemory   = gonvml.FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT
	fieldLimitGPU      = gonvml.FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT
)

// Counters that only tell errors, summed: those of the PCIe link except the
// fatal ones, and of the C2C links. A GPU is judged by their growth, whatever
// the kind. How often the PCIe link went through recovery (field 169) is none of
// them: it does so at each change of its speed, which an idle GPU makes by itself.
var (
	pcieErrorFields = []uint32{
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

// Errors that NVLink 5 counts for each link: packets that were malformed,
// overran a buffer, came with errors, were marked so by the other side, did not
// match, broke the link's own limit or were discarded; then errors that were
// left after correction.
var link5Errors = []uint32{
	gonvml.FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS, gonvml.FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS,
	gonvml.FI_DEV_NVLINK_COUNT_RCV_ERRORS, gonvml.FI_DEV_NVLINK_COUNT_RCV_REMOTE_ERRORS,
	gonvml.FI_DEV_NVLINK_COUNT_RCV_GENERAL_ERRORS, gonvml.FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
	gonvml.FI_DEV_NVLINK_COUNT_XMIT_DISCARDS,
	gonvml.FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS, gonvml.FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS,
}

// link5Recoveries count how often a link left the state up: whatever came of
// it, with success, without.
var link5Recoveries = []uint32{
	gonvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
	gonvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS, gonvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
}

// link5Rates are the bit error rates that belong to the last two of link5Errors.
var link5Rates = []uint32{gonvml.FI_DEV_NVLINK_COUNT_EFFECTIVE_BER, gonvml.FI_DEV_NVLINK_COUNT_SYMBOL_BER}

const symbolFields = "nvmlDeviceGetFieldValues"

// field reads one field value; link is its scope.
func (d device) field(id uint32, link int) Reading[uint64] { return d.fields([]uint32{id}, link)[0] }

// fields reads several values of one scope in one call. A driver older than the
// number of a field refuses it as an argument: to this driver there is no such
// field.
func (d device) fields(ids []uint32, link int) []Reading[uint64] {
	values := make([]gonvml.FieldValue, len(ids))
	for i, id := range ids {
		values[i] = gonvml.FieldValue{FieldId: id, ScopeId: uint32(link)}
	}
	call := ask(d.library, d.scope, func() (bool, gonvml.Return) { return true, d.GetFieldValues(values) }, symbolFields)
	out := make([]Reading[uint64], len(ids))
	for i, v := range values {
		switch ret := gonvml.Return(v.NvmlReturn); {
		case !call.OK():
			out[i] = Reading[uint64]{Code: call.Code, Missing: call.Missing}
		case ret == gonvml.SUCCESS:
			out[i] = Reading[uint64]{Value: number(v)}
		case ret == gonvml.ERROR_INVALID_ARGUMENT:
			out[i] = Reading[uint64]{Code: NotSupported}
		default:
			out[i] = Reading[uint64]{Code: Code(ret)}
		}
	}
	return out
}

// link5 reads the counters of an NVLink 5 link in one call. The reason is that
// of the first one where none is answered, as on links of another generation.
func (d device) link5(link int) Reading[Link5] {
	ids := slices.Concat(link5Errors, link5Recoveries, link5Rates)
	values := d.fields(ids, link)
	answered := map[uint32]uint64{}
	for i, v := range values {
		if v.OK() {
			answered[ids[i]] = v.Value
		}
	}
	if len(answered) == 0 {
		return Reading[Link5]{Code: values[0].Code, Missing: values[0].Missing}
	}
	var out Link5
	for _, id := range link5Errors {
		out.Errors += answered[id]
	}
	// A driver may count the outcomes and not the sum of them.
	out.Recoveries = max(answered[link5Recoveries[0]], answered[link5Recoveries[1]]+answered[link5Recoveries[2]])
	out.EffectiveRate, out.SymbolRate = answered[link5Rates[0]], answered[link5Rates[1]]
	return Reading[Link5]{Value: out}
}

func (d device) pcieErrors() Reading[uint64] { return d.sum(pcieErrorFields, 1) }

// c2cErrors adds those of every link between the chips.
func (d device) c2cErrors() Reading[uint64] {
	n := d.field(fieldC2CCount, 0)
	if n.OK() && n.Value == 0 {
		return Reading[uint64]{Code: NotSupported}
	}
	if !n.OK() {
		return n
	}
	return d.sum(c2cErrorFields, int(min(n.Value, mostC2CLinks)))
}

// sum adds the fields of each link that are answered; without one, the last
// reason stands.
func (d device) sum(ids []uint32, links int) Reading[uint64] {
	var total Reading[uint64]
	answered := false
	for l := range links {
		for _, r := range d.fields(ids, l) {
			switch {
			case r.OK():
				total, answered = Reading[uint64]{Value: total.Value + r.Value}, true
			case !answered:
				total = r
			}
		}
	}
	return total
}

// degrees reads a field that is signed.
func (d device) degrees(id uint32) Reading[int] {
	return then(d.field(id, 0), func(n uint64) int { return int(int32(n)) })
}

// c2cLinks reads state and bandwidth of each link between the chips.
func (d device) c2cLinks() Reading[[]C2CLink] {
	return then(d.field(fieldC2CCount, 0), func(n uint64) []C2CLink {
		var links []C2CLink
		for l := range int(min(n, mostC2CLinks)) {
			links = append(links, C2CLink{
				Up:        then(d.field(fieldC2CStatus, l), func(status uint64) bool { return status == 1 }),
				Bandwidth: d.field(fieldC2CBandwidth, l),
			})
		}
		return links
	})
}

// mostC2CLinks bounds an answer that makes no sense: a chip has 14.
const mostC2CLinks = 64

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
