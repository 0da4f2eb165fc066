package tensorfusion

import (
	"testing"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestAllocationsNameTheirPodsInEitherForm(t *testing.T) {
	a := map[string]bool{"ml/a": true}
	assert.Equal(t, a, readAllocations([]byte(`{"allocation":{"uid-1":{"podMeta":{"namespace":"ml","name":"a"}}},"gpuStore":{}}`)))
	assert.Equal(t, a, readAllocations([]byte(`{"allocation":{"uid-1":{"PoolName":"p","PodMeta":{"namespace":"ml","name":"a"}}}}`)), "as the controller writes it")
	assert.Equal(t, a, readAllocations([]byte(`{"allocation":[{"podMeta":{"namespace":"ml","name":"a"}}]}`)))
	assert.Equal(t, map[string]bool{}, readAllocations([]byte(`{"allocation":{}}`)), "nothing is given out")
	for _, unknown := range []string{`not json`, `{"gpuStore":{}}`, `{"allocation":{"uid-1":{}}}`, `{"allocation":"x"}`} {
		assert.Nil(t, readAllocations([]byte(unknown)), unknown)
	}
}

func workerPod(name string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: "uid-1", Labels: map[string]string{labelWorkload: "llm"}},
		Status:     provenPod("x").Status,
	}
}

func TestOnlyThePodsThatStillRunAreMissedInTheAllocations(t *testing.T) {
	o := soundWorld()
	o.Workers = []corev1.Pod{workerPod("a"), workerPod("b"), workerPod("pending")}
	o.Allocated = map[string]bool{"ml/a": true, "ml/b": true, "ml/app": true}
	o.Before = o.snapshot()
	assert.Equal(t, []string{"ml/pending"}, o.Before.Unallocated)
	assert.Equal(t, []string{"ml/app"}, o.Before.Allocated, "no worker of a workload")
	assert.Equal(t, 3, o.Before.Allocations)

	lost := func(spoil func(*Observation)) int {
		now := *o
		now.Workers = []corev1.Pod{workerPod("a"), workerPod("b"), workerPod("pending")}
		now.Allocated = map[string]bool{"ml/a": true, "ml/app": true, "ml/new": true}
		spoil(&now)
		return len(checkAllocations(&now))
	}
	assert.Equal(t, 1, lost(func(*Observation) {}), "b; pending had none")
	assert.Zero(t, lost(func(o *Observation) { o.Workers[1].UID = "another" }))
	assert.Zero(t, lost(func(o *Observation) { o.Workers[1].Status.Phase = corev1.PodSucceeded }))
	assert.Zero(t, lost(func(o *Observation) { o.Workers[1].DeletionTimestamp = &metav1.Time{} }))
	assert.Zero(t, lost(func(o *Observation) { o.Workers = o.Workers[:1] }))
}

func TestAfterTheHelmStepNoListOfAllocationsGrows(t *testing.T) {
	o := soundWorld()
	o.Workers = []corev1.Pod{workerPod("a"), workerPod("pending")}
	o.Allocated = map[string]bool{"ml/a": true, "ml/app": true}
	before := o.snapshot()
	before.AfterHelm()
	o.Workers, o.Allocated = append(o.Workers, workerPod("new")), nil
	now := o.snapshot()
	now.carry(before)
	assert.Empty(t, now.Unallocated)
	assert.Empty(t, now.Allocated)
	assert.Equal(t, -1, now.Allocations)
	assert.Len(t, now.Workers, 3)
}

func TestASnapshotWithoutAnAnswerCarriesTheAllocationsOn(t *testing.T) {
	o := soundWorld()
	o.Workers = []corev1.Pod{workerPod("a"), workerPod("pending")}
	o.Allocated = map[string]bool{"ml/a": true, "ml/app": true}
	before := o.snapshot()
	o.Workers, o.Allocated = append(o.Workers, workerPod("new")), nil
	now := o.snapshot()
	assert.Equal(t, -1, now.Allocations)
	now.carry(before)
	assert.Equal(t, 2, now.Allocations)
	assert.Equal(t, []string{"ml/a", "ml/app"}, now.holders(), "of the new one nothing is known")
}
