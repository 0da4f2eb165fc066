package nvml

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/refit-run/refit/gpuagent/child"
)

// library is NVML after a successful Init, in this process.
type library struct{ gonvml.Interface }

// open loads and initialises the library that is on disk now. Only a code of
// Success gives a library that may be called.
func open() (library, Code) {
	child.Stage("nvmlInit_v2")
	api := gonvml.New()
	return library{api}, Code(api.Init())
}

// has reports whether the installed library knows one of the symbols, and
// names the first when it knows none. A function with versions has several.
func (l library) has(symbols ...string) (missing string) {
	for _, s := range symbols {
		if l.Extensions().LookupSymbol(s) == nil {
			return ""
		}
	}
	return symbols[0]
}

// ask makes one guarded call. scope names the GPU for the log, from which a
// hang is located.
func ask[T any](l library, scope string, call func() (T, gonvml.Return), symbols ...string) Reading[T] {
	if missing := l.has(symbols...); missing != "" {
		return Reading[T]{Missing: missing}
	}
	child.Stage("%s %s", scope, symbols[0])
	value, ret := call()
	if ret != gonvml.SUCCESS {
		var none T
		return Reading[T]{Value: none, Code: Code(ret)}
	}
	return Reading[T]{Value: value}
}

// then turns a value into another and keeps the reason when there is none.
func then[A, B any](r Reading[A], turn func(A) B) Reading[B] {
	if !r.OK() {
		return Reading[B]{Code: r.Code, Missing: r.Missing}
	}
	return Reading[B]{Value: turn(r.Value)}
}

// pair joins two readings of one kind.
func pair(a, b Reading[int]) Reading[Pair] {
	if !a.OK() {
		return Reading[Pair]{Code: a.Code, Missing: a.Missing}
	}
	return then(b, func(other int) Pair { return Pair{a.Value, other} })
}

func on(s gonvml.EnableState) bool { return s == gonvml.FEATURE_ENABLED }

func text(chars []int8) string {
	b := make([]byte, 0, len(chars))
	for _, c := range chars {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}
