package nvml

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

func (d device) memory(to *Device) {
	to.ECCMode = get(d, func() (Pair, gonvml.Return) {
		current, pending, ret := d.GetEccMode()
		return Pair{int(current), int(pending)}, ret
	}, "nvmlDeviceGetEccMode")
	uncorrected := func(counter gonvml.EccCounterType) Reading[uint64] {
		return get(d, func() (uint64, gonvml.Return) {
			return d.GetTotalEccErrors(gonvml.MEMORY_ERROR_TYPE_UNCORRECTED, counter)
		}, "nvmlDeviceGetTotalEccErrors")
	}
	to.ECCVolatile = uncorrected(gonvml.VOLATILE_ECC)
	to.ECCAggregate = uncorrected(gonvml.AGGREGATE_ECC)
	to.SRAMOver = then(get(d, d.GetSramEccErrorStatus, "nvmlDeviceGetSramEccErrorStatus"),
		func(s gonvml.EccSramErrorStatus) bool { return s.BThresholdExceeded != 0 })
	to.Remap = get(d, func() (Remap, gonvml.Return) {
		r := remapOf(d.Device)
		return r.Value, gonvml.Return(r.Code)
	}, remapSymbol)
	to.RemapNone = then(get(d, d.GetRowRemapperHistogram, "nvmlDeviceGetRowRemapperHistogram"),
		func(h gonvml.RowRemapperHistogramValues) uint64 { return uint64(h.None) })
	to.Unrepairable = then(get(d, d.GetUnrepairableMemoryFlag_v1, "nvmlDeviceGetUnrepairableMemoryFlag_v1"),
		func(s gonvml.UnrepairableMemoryStatus_v1) bool { return s.BUnrepairableMemory != 0 })
	to.RepairWaits = then(get(d, d.GetRepairStatus, "nvmlDeviceGetRepairStatus"),
		func(s gonvml.RepairStatus) bool { return s.BChannelRepairPending != 0 || s.BTpcRepairPending != 0 })
	to.RetiredWaits = then(get(d, d.GetRetiredPagesPendingStatus, "nvmlDeviceGetRetiredPagesPendingStatus"), on)
	to.Retired = d.retired()
	to.Memory = d.memoryInUse()
	to.Processes, to.Unlisted = d.processes()
}

func (d device) retired() Reading[Retired] {
	pages := func(cause gonvml.PageRetirementCause) Reading[[]uint64] {
		r := get(d, func() ([]uint64, gonvml.Return) {
			addresses, _, ret := d.GetRetiredPages_v2(cause)
			return addresses, ret
		}, "nvmlDeviceGetRetiredPages_v2")
		if r.Missing != "" {
			r = get(d, func() ([]uint64, gonvml.Return) { return d.GetRetiredPages(cause) }, "nvmlDeviceGetRetiredPages")
		}
		return r
	}
	single := pages(gonvml.PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS)
	if !single.OK() {
		return Reading[Retired]{Code: single.Code, Missing: single.Missing}
	}
	return then(pages(gonvml.PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR), func(double []uint64) Retired {
		return Retired{SingleBit: len(single.Value), DoubleBit: len(double)}
	})
}

// memoryInUse prefers the second version, which does not count what the driver
// reserves as used.
func (d device) memoryInUse() Reading[Memory] {
	r := then(get(d, d.GetMemoryInfo_v2, "nvmlDeviceGetMemoryInfo_v2"),
		func(m gonvml.Memory_v2) Memory { return Memory{Total: m.Total, Used: m.Used} })
	if r.Missing != "" || r.Code.otherVersion() {
		r = then(get(d, d.GetMemoryInfo, "nvmlDeviceGetMemoryInfo"),
			func(m gonvml.Memory) Memory { return Memory{Total: m.Total, Used: m.Used} })
	}
	return r
}

// processes joins the lists of all kinds. Compute processes must be known; the
// other kinds do not exist on every GPU, and unlisted names those.
func (d device) processes() (running Reading[[]Process], unlisted []string) {
	kinds := []struct {
		name   string
		list   func() ([]gonvml.ProcessInfo, gonvml.Return)
		symbol string
	}{
		{"compute", d.GetComputeRunningProcesses, "nvmlDeviceGetComputeRunningProcesses"},
		{"graphics", d.GetGraphicsRunningProcesses, "nvmlDeviceGetGraphicsRunningProcesses"},
		{"mps", d.GetMPSComputeRunningProcesses, "nvmlDeviceGetMPSComputeRunningProcesses"},
	}
	out := Reading[[]Process]{Value: []Process{}}
	for i, kind := range kinds {
		r := get(d, kind.list, kind.symbol+"_v3", kind.symbol+"_v2", kind.symbol)
		switch {
		case r.OK():
		case i > 0 && r.Absent():
			unlisted = append(unlisted, kind.name)
		default:
			return Reading[[]Process]{Code: r.Code, Missing: r.Missing}, nil
		}
		for _, p := range r.Value {
			out.Value = append(out.Value, Process{PID: int(p.Pid), Kind: kind.name})
		}
	}
	return out, unlisted
}

func (d device) limits(to *Device) {
	degrees := func(t uint32) int { return int(t) }
	to.Temperature = then(get(d, func() (uint32, gonvml.Return) { return d.GetTemperature(gonvml.TEMPERATURE_GPU) },
		"nvmlDeviceGetTemperature"), degrees)
	// The newer call answers where the older one is no longer supported.
	if !to.Temperature.OK() && d.has("nvmlDeviceGetTemperatureV") == "" {
		to.Temperature = then(get(d, d.GetTemperatureV().V1, "nvmlDeviceGetTemperatureV"),
			func(t gonvml.Temperature) int { return int(t.Temperature) })
	}
	threshold := func(kind gonvml.TemperatureThresholds) Reading[int] {
		return then(get(d, func() (uint32, gonvml.Return) { return d.GetTemperatureThreshold(kind) },
			"nvmlDeviceGetTemperatureThreshold"), degrees)
	}
	to.Slowdown = threshold(gonvml.TEMPERATURE_THRESHOLD_SLOWDOWN)
	to.MemoryMax = threshold(gonvml.TEMPERATURE_THRESHOLD_MEM_MAX)
	to.Margin = then(get(d, d.GetMarginTemperature, "nvmlDeviceGetMarginTemperature"),
		func(m gonvml.MarginTemperature) int { return int(m.MarginTemperature) })
	to.Limits = Limits{Shutdown: d.degrees(fieldLimitShutdown), Slowdown: d.degrees(fieldLimitSlowdown),
		Memory: d.degrees(fieldLimitMemory), GPU: d.degrees(fieldLimitGPU)}
	to.MemoryTemp = then(d.field(fieldMemoryTemp, 0), func(n uint64) int { return int(n) })
	milliwatts := func(call func() (uint32, gonvml.Return), symbol string) Reading[uint64] {
		return then(get(d, call, symbol), func(n uint32) uint64 { return uint64(n) })
	}
	to.PowerLimit = milliwatts(d.GetPowerManagementLimit, "nvmlDeviceGetPowerManagementLimit")
	to.Power = Power{
		Enforced: milliwatts(d.GetEnforcedPowerLimit, "nvmlDeviceGetEnforcedPowerLimit"),
		Default:  milliwatts(d.GetPowerManagementDefaultLimit, "nvmlDeviceGetPowerManagementDefaultLimit"),
		Bounds: get(d, func() (Bounds, gonvml.Return) {
			least, most, ret := d.GetPowerManagementLimitConstraints()
			return Bounds{uint64(least), uint64(most)}, ret
		}, "nvmlDeviceGetPowerManagementLimitConstraints"),
	}
	to.Persistence = then(get(d, d.GetPersistenceMode, "nvmlDeviceGetPersistenceMode"), on)
	to.ComputeMode = then(get(d, d.GetComputeMode, "nvmlDeviceGetComputeMode"), func(m gonvml.ComputeMode) int { return int(m) })
}

func (d device) links(to *Device) {
	to.LinkCount = d.field(fieldLinkCount, 0)
	for l := range linksRead(to.LinkCount) {
		link := d.link(l)
		// The links of a GPU are of one generation: the first one tells.
		if l == 0 || to.Links[0].Five.Code != NotSupported {
			link.Five = d.link5(l)
		} else {
			link.Five = to.Links[0].Five
		}
		to.Links = append(to.Links, link)
	}
	to.Fabric = d.fabric()
	if d.has("nvmlDeviceGetC2cModeInfoV") == "" {
		to.C2C = then(get(d, d.GetC2cModeInfoV().V1, "nvmlDeviceGetC2cModeInfoV"),
			func(i gonvml.C2cModeInfo_v1) bool { return i.IsC2cEnabled != 0 })
	} else {
		to.C2C = Reading[bool]{Missing: "nvmlDeviceGetC2cModeInfoV"}
	}
	to.C2CLinks = d.c2cLinks()
	to.C2CErrors = d.c2cErrors()
}

// linksRead is how many links are read of those that the driver counts: it takes
// no number beyond those of the API that this was built with.
func linksRead(count Reading[uint64]) int { return int(min(count.Value, gonvml.NVLINK_MAX_LINKS)) }

// linkCounter asks for the older form of a counter where the field has no answer.
func (d device) linkCounter(l int, field uint32, older gonvml.NvLinkErrorCounter) Reading[uint64] {
	if r := d.field(field, l); r.OK() {
		return r
	}
	return get(d, func() (uint64, gonvml.Return) { return d.GetNvLinkErrorCounter(l, older) }, "nvmlDeviceGetNvLinkErrorCounter")
}

func (d device) linkCRC(l int) Reading[uint64] {
	return d.linkCounter(l, fieldLinkCRC, gonvml.NVLINK_ERROR_DL_CRC_FLIT)
}

func (d device) link(l int) Link {
	return Link{
		Up: then(get(d, func() (gonvml.EnableState, gonvml.Return) { return d.GetNvLinkState(l) }, "nvmlDeviceGetNvLinkState"), on),
		Remote: then(get(d, func() (gonvml.IntNvLinkDeviceType, gonvml.Return) { return d.GetNvLinkRemoteDeviceType(l) },
			"nvmlDeviceGetNvLinkRemoteDeviceType"), func(t gonvml.IntNvLinkDeviceType) int { return int(t) }),
		Speed:    d.field(fieldLinkSpeed, l),
		Replay:   d.linkCounter(l, fieldLinkReplay, gonvml.NVLINK_ERROR_DL_REPLAY),
		Recovery: d.linkCounter(l, fieldLinkRecovery, gonvml.NVLINK_ERROR_DL_RECOVERY),
		CRC:      d.linkCRC(l),
	}
}

// fabric asks for the newest form that the driver answers: the third has a
// summary, the second the health mask, the first neither.
func (d device) fabric() Reading[Fabric] {
	const versioned, plain = "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo"
	if d.has(versioned) == "" {
		third := then(get(d, d.GetGpuFabricInfoV().V3, versioned), func(i gonvml.GpuFabricInfo_v3) Fabric {
			return Fabric{Version: 3, State: int(i.State), Status: Code(i.Status), Health: i.HealthMask, Summary: int(i.HealthSummary)}
		})
		if third.OK() || third.Code == NotSupported {
			return third
		}
		second := then(get(d, d.GetGpuFabricInfoV().V2, versioned), func(i gonvml.GpuFabricInfo_v2) Fabric {
			return Fabric{Version: 2, State: int(i.State), Status: Code(i.Status), Health: i.HealthMask}
		})
		if second.OK() {
			return second
		}
	}
	return then(get(d, d.GetGpuFabricInfo, plain), func(i gonvml.GpuFabricInfo) Fabric {
		return Fabric{Version: 1, State: int(i.State), Status: Code(i.Status)}
	})
}
