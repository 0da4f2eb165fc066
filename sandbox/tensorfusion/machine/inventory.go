package machine

import (
	"sort"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// InventoryView is what the Node reconciler sees.
type InventoryView struct {
	// Node is nil when it is gone.
	Node *Node
	// Selector is the watch filter of the controller, one key=value.
	Selector labels.Selector
	Pools    []Pool
	// GPUNode is nil when it does not exist.
	GPUNode *GPUNode
}

// InventoryResult says what becomes of the GPUNode.
type InventoryResult struct {
	Create string // the pool it joins
	Delete bool
}

// ReconcileInventory gives a Node that matches a pool its GPUNode and takes it
// away when it no longer does. A Node outside the watch filter is not seen at
// all, and a cordoned one gets no new GPUNode.
func ReconcileInventory(v InventoryView) InventoryResult {
	if v.Node == nil || v.Node.Deleting || !v.Selector.Matches(labels.Set(v.Node.Labels)) {
		return InventoryResult{}
	}
	pools := append([]Pool(nil), v.Pools...)
	sort.Slice(pools, func(i, j int) bool { return pools[i].Name < pools[j].Name })
	for _, pool := range pools {
		if !pool.Spec.selects(v.Node) {
			continue
		}
		if v.GPUNode != nil || v.Node.Unschedulable {
			return InventoryResult{}
		}
		return InventoryResult{Create: pool.Name}
	}
	return InventoryResult{Delete: v.GPUNode != nil && !v.GPUNode.Deleting}
}

func (s *PoolSpec) selects(node *Node) bool {
	if s.NodeManagerConfig == nil || s.NodeManagerConfig.NodeSelector == nil {
		return true
	}
	selector, err := nodeaffinity.NewNodeSelector(s.NodeManagerConfig.NodeSelector)
	if err != nil {
		return false
	}
	return selector.Match(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node.Name, Labels: node.Labels}})
}
