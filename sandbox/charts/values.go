package charts

// Values are an operator's install values: two pools, two controller replicas,
// an external database, and secrets that are obviously fake. Every call gives
// a fresh copy. controller.admissionWebhooks.url is left for the sandbox to set.
func Values() map[string]any {
	pool := func(name string) map[string]any {
		return map[string]any{"name": name, "nodeSelectorKey": "refit.sandbox/pool", "nodeSelectorValue": name}
	}
	return map[string]any{
		"controller": map[string]any{"replicaCount": 2},
		"cluster": map[string]any{
			"hypervisorImage": HypervisorImage("2.15.0"),
			"pools":           []any{pool("shared"), pool("training")},
		},
		"greptime": map[string]any{
			"installStandalone": false,
			"isCloud":           true,
			"host":              "greptimedb.refit.local",
			"user":              "refit",
			"password":          "fake-greptime-password-0000",
		},
		"agent": map[string]any{
			"agentId":     "fake-agent-0000",
			"enrollToken": "fake-enroll-token-0000",
		},
		"cloudVendorCredentials": map[string]any{
			"accessKey": "fake-access-key-0000",
			"secretKey": "fake-secret-key-0000",
		},
	}
}

// PoolNodeLabels are the labels that put a Node into one of the pools of
// Values.
func PoolNodeLabels(pool string) map[string]string {
	return map[string]string{"nvidia.com/gpu.present": "true", "refit.sandbox/pool": pool}
}
