package agent

import (
	"context"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// recorder notes every change that reaches it.
type recorder struct {
	Setters
	reached []string
}

func (r *recorder) ActMIG(ctx context.Context, a nvml.MIGAct) (nvml.MIGOutcome, error) {
	r.reached = append(r.reached, a.Kind)
	return r.Setters.ActMIG(ctx, a)
}

func (r *recorder) ActVGPU(ctx context.Context, a nvml.VGPUAct) (nvml.VGPUGPU, error) {
	r.reached = append(r.reached, a.Kind)
	return r.Setters.ActVGPU(ctx, a)
}

func (r *recorder) Write(ctx context.Context, path, value string) error {
	r.reached = append(r.reached, path)
	return r.Setters.Write(ctx, path, value)
}

func (r *recorder) SetVF(ctx context.Context, vf, value, was string) error {
	r.reached = append(r.reached, vf)
	return r.Setters.SetVF(ctx, vf, value, was)
}

func (r *recorder) EnableVFs(ctx context.Context, pci string) error {
	r.reached = append(r.reached, pci)
	return r.Setters.EnableVFs(ctx, pci)
}

func (r *recorder) Reset(ctx context.Context, pci ...string) error {
	r.reached = append(r.reached, pci...)
	return r.Setters.Reset(ctx, pci...)
}

// Whatever is added to Setters and is no reading must refuse too.
func TestARefusedSetterIsNeverReached(t *testing.T) {
	w := newWorld(t)
	under := &recorder{Setters: NewSetters(w.tree.Root)}
	kind, value := reflect.TypeFor[Setters](), reflect.ValueOf(Refusing(under))
	setters := 0
	for i := range kind.NumMethod() {
		m := kind.Method(i)
		if strings.HasPrefix(m.Name, "Read") {
			continue
		}
		setters++
		args := []reflect.Value{}
		for n := range m.Type.NumIn() {
			switch {
			case m.Type.In(n) == reflect.TypeFor[context.Context]():
				args = append(args, reflect.ValueOf(context.Background()))
			case m.Type.IsVariadic() && n == m.Type.NumIn()-1:
			default:
				args = append(args, reflect.Zero(m.Type.In(n)))
			}
		}
		out := value.MethodByName(m.Name).Call(args)
		err, _ := out[len(out)-1].Interface().(error)
		require.ErrorIs(t, err, setup.ErrRefused, m.Name)
	}
	require.Equal(t, 6, setters)
	require.Empty(t, under.reached)
}

func TestAPreparationOfARefusingHostChangesNothing(t *testing.T) {
	w := newWorld(t)
	under := &recorder{Setters: NewSetters(w.tree.Root)}
	w.agent.Preparer.Setters = Refusing(under)
	before, err := os.ReadFile(w.gpus.StateFile())
	require.NoError(t, err)
	_, err = w.prepare(gpu.MIGRequest{Config: twoHalves, AllowReset: true})
	require.ErrorIs(t, err, setup.ErrRefused)
	require.Empty(t, under.reached)
	after, err := os.ReadFile(w.gpus.StateFile())
	require.NoError(t, err)
	require.Equal(t, string(before), string(after))

	w.agent.Preparer.Setters = under
	_, err = w.prepare(gpu.MIGRequest{Config: twoHalves})
	require.NoError(t, err)
	require.NotEmpty(t, under.reached, "the recorder sees what is not refused")
}
