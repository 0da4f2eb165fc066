package machine

import (
	"encoding/json"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

func vendorKey(vendor string) string { return strings.ToLower(vendor) }

// revisions reads the pool's annotation; what does not parse is none.
func revisions(pool *Pool) map[string]string {
	var found map[string]string
	if err := json.Unmarshal([]byte(pool.Annotations[RevisionsAnnotation]), &found); err != nil {
		return nil
	}
	return found
}

// Revision is the hash of a ProviderConfig. Values of extraEnv are left out:
// changing one rolls nothing.
func (p *Provider) Revision() (string, error) {
	spec := p.Spec
	if spec.Hypervisor != nil {
		h := *spec.Hypervisor
		h.ExtraEnv = slices.Clone(h.ExtraEnv)
		for i := range h.ExtraEnv {
			h.ExtraEnv[i] = corev1.EnvVar{Name: h.ExtraEnv[i].Name}
		}
		spec.Hypervisor = &h
	}
	return hash(spec)
}

// Memory is what a controller process loses when it ends.
type Memory struct {
	// providers maps a ProviderConfig to the hash this process saw last.
	providers map[string]string
}

// ProviderView is what the ProviderConfig reconciler sees.
type ProviderView struct {
	Provider Provider
	Pools    []Pool
}

// ProviderResult is what it writes.
type ProviderResult struct {
	// Annotations to set on the ProviderConfig.
	Annotations map[string]string
	// PoolAnnotations to set, by pool.
	PoolAnnotations map[string]map[string]string
	// DeleteHypervisors: pods of all nodes of these pools go at once (< 2.14).
	DeleteHypervisors []string
}

// ReconcileProvider spreads a ProviderConfig. Before 2.14 a change deletes all
// hypervisors of the vendor, whatever the policy says, and before 2.11.2 so
// does every controller start; since 2.14 it becomes part of the pools' hashes.
func (p Process) ReconcileProvider(v ProviderView, memory *Memory) (ProviderResult, error) {
	var r ProviderResult
	revision, err := v.Provider.Revision()
	if err != nil {
		return r, err
	}
	var affected []Pool
	for _, pool := range v.Pools {
		if vendorKey(pool.Spec.vendor()) == vendorKey(v.Provider.Spec.Vendor) {
			affected = append(affected, pool)
		}
	}
	changed := false
	if p.Version.remembersProvider() {
		before := v.Provider.Annotations[providerHashAnnotation]
		changed = before != "" && before != revision
		if before != revision {
			r.Annotations = map[string]string{providerHashAnnotation: revision}
		}
	} else {
		if memory.providers == nil {
			memory.providers = map[string]string{}
		}
		changed = memory.providers[v.Provider.Name] != revision
		memory.providers[v.Provider.Name] = revision
	}
	if !p.Version.batchesProvider() {
		if changed {
			for _, pool := range affected {
				r.DeleteHypervisors = append(r.DeleteHypervisors, pool.Name)
			}
		}
		return r, nil
	}
	for _, pool := range affected {
		found := revisions(&pool)
		key := vendorKey(v.Provider.Spec.Vendor)
		if found[key] == revision {
			continue
		}
		merged := map[string]string{key: revision}
		for vendor, other := range found {
			if vendor != key {
				merged[vendor] = other
			}
		}
		text, err := json.Marshal(merged)
		if err != nil {
			return r, err
		}
		if r.PoolAnnotations == nil {
			r.PoolAnnotations = map[string]map[string]string{}
		}
		r.PoolAnnotations[pool.Name] = map[string]string{RevisionsAnnotation: string(text)}
	}
	return r, nil
}

// Serves reports whether the provider is of the pool's vendor.
func (p *Provider) Serves(pool *Pool) bool {
	return vendorKey(p.Spec.Vendor) == vendorKey(pool.Spec.vendor())
}
