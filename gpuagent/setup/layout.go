package setup

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// Version is the only version of the layout files that exists.
const Version = "v1"

// Devices is the field `devices` of a layout's entry: "all" or a list of
// indices in PCI order.
type Devices struct {
	All     bool
	Indices []int
}

// UnmarshalJSON takes what mig-parted takes.
func (d *Devices) UnmarshalJSON(data []byte) error {
	var word string
	if json.Unmarshal(data, &word) == nil {
		if word != "all" {
			return fmt.Errorf(`devices is %q: want "all" or a list of indices`, word)
		}
		*d = Devices{All: true}
		return nil
	}
	var list []int
	if err := json.Unmarshal(data, &list); err != nil {
		return errors.New(`devices: want "all" or a list of indices`)
	}
	seen := map[int]bool{}
	for _, i := range list {
		if i < 0 || seen[i] {
			return fmt.Errorf("devices holds %d twice or below 0: want each index once", i)
		}
		seen[i] = true
	}
	*d = Devices{Indices: list}
	return nil
}

// Filter is the field `device-filter`: one PCI id "0xDDDDVVVV" or a list.
type Filter []string

// UnmarshalJSON takes a string or a list of strings.
func (f *Filter) UnmarshalJSON(data []byte) error {
	var one string
	if json.Unmarshal(data, &one) == nil {
		*f = Filter{one}
		return f.check()
	}
	var list []string
	if err := json.Unmarshal(data, &list); err != nil {
		return errors.New("device-filter: want a PCI id such as \"0x233010DE\", or a list of them")
	}
	*f = list
	return f.check()
}

func (f *Filter) check() error {
	for _, id := range *f {
		digits, ok := strings.CutPrefix(strings.ToLower(id), "0x")
		if !ok || len(digits) != 8 || strings.Trim(digits, "0123456789abcdef") != "" {
			return fmt.Errorf("device-filter %q: want device and vendor id as \"0x233010DE\"", id)
		}
	}
	return nil
}

// Selector chooses GPUs of a host.
type Selector struct {
	Devices *Devices `json:"devices"`
	Filter  Filter   `json:"device-filter,omitempty"`
}

// Takes reports whether the selector names the GPU at index with the PCI id.
func (s Selector) Takes(index int, pciID uint32) bool {
	if s.Devices == nil || !s.Devices.All && !slices.Contains(s.Devices.Indices, index) {
		return false
	}
	if len(s.Filter) == 0 {
		return true
	}
	return slices.ContainsFunc(s.Filter, func(id string) bool { return strings.EqualFold(id, fmt.Sprintf("0x%08X", pciID)) })
}

// Missing are the indices that no GPU of a host with count GPUs has.
func (s Selector) Missing(count int) []int {
	if s.Devices == nil {
		return nil
	}
	var out []int
	for _, i := range s.Devices.Indices {
		if i >= count {
			out = append(out, i)
		}
	}
	return out
}

// Decode reads YAML into out; unknown and repeated keys are errors.
func Decode(text []byte, out any) error {
	data, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(out); err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("the file is empty")
		}
		return err
	}
	return nil
}

// Layouts checks the layouts of a file, under the key that holds them, and
// chooses the one named, or the only one. All must be valid: a file with a
// mistake in it is not half used.
func Layouts[E any](kind, key, version string, configs map[string][]E, check func(E) error, label string) ([]E, error) {
	if version != Version {
		return nil, Bad(kind, "version: "+Version, fmt.Sprintf("version: %q", version), "correct the file")
	}
	if len(configs) == 0 {
		return nil, Bad(kind, "at least one layout under "+key, "none", "correct the file")
	}
	names := slices.Sorted(maps.Keys(configs))
	for _, name := range names {
		if name == "" {
			return nil, Bad(kind, "a label for each layout", "an empty one", "name the layout")
		}
		if len(configs[name]) == 0 {
			return nil, Bad(kind+" "+name, "at least one entry", "none", "correct the file")
		}
		for i, e := range configs[name] {
			if err := check(e); err != nil {
				return nil, Bad(fmt.Sprintf("%s %s, entry %d", kind, name, i+1), "", err.Error(), "correct the file")
			}
		}
	}
	if label == "" && len(names) == 1 {
		label = names[0]
	}
	entries, ok := configs[label]
	switch {
	case label == "":
		return nil, Bad(kind, "the label of a layout", "none, and the file holds "+strings.Join(names, ", "), "name one of them")
	case !ok:
		return nil, Bad(kind, "one of "+strings.Join(names, ", "), fmt.Sprintf("label %q", label), "name a layout of the file")
	}
	return entries, nil
}

// GPU is what an entry selects a GPU by; Name is what a person knows it by.
type GPU struct {
	Index      int
	PCIID      uint32
	UUID, Name string
}

// Entry is one entry of a layout.
type Entry interface {
	Takes(index int, pciID uint32) bool
	Missing(count int) []int
}

// Assign gives each GPU, by UUID, the entry that selects it. GPUs that no entry
// selects are left alone.
func Assign[E Entry](kind string, entries []E, gpus []GPU) (map[string]E, error) {
	out := map[string]E{}
	for i, e := range entries {
		object := fmt.Sprintf("%s, entry %d", kind, i+1)
		if missing := e.Missing(len(gpus)); len(missing) > 0 {
			return nil, Bad(object, fmt.Sprintf("indices below %d", len(gpus)), strings.Trim(fmt.Sprint(missing), "[]"),
				"the host has fewer GPUs than the layout names: correct it, or find the lost GPU")
		}
		for _, g := range gpus {
			if !e.Takes(g.Index, g.PCIID) {
				continue
			}
			if _, twice := out[g.UUID]; twice {
				return nil, Bad(object, "each GPU in one entry", fmt.Sprintf("GPU %d (%s) is selected by an earlier one too", g.Index, g.Name), "correct the file")
			}
			out[g.UUID] = e
		}
	}
	return out, nil
}
