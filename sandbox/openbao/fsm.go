package openbao

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"

	"github.com/hashicorp/raft"
	"go.etcd.io/bbolt"
)

// state is what the members agree on: names and values. As with the real
// storage it is on disk, so that a member without a leader still has it.
type state struct{ db *bbolt.DB }

var (
	bucketData = []byte("data")
	bucketMeta = []byte("meta")
	keyApplied = []byte("applied")
)

// Names of what the server itself keeps there.
const (
	nameToken  = "core/root-token"
	nameLeader = "core/leader"
)

func openState(dir string) (*state, error) {
	db, err := openBolt(filepath.Join(dir, "vault.db"), bucketData, bucketMeta)
	return &state{db}, err
}

// change is one entry of Raft's log; without a value it deletes.
type change struct {
	Name  string `json:"name"`
	Value []byte `json:"value,omitempty"`
}

func (s *state) Apply(l *raft.Log) any {
	var c change
	if err := json.Unmarshal(l.Data, &c); err != nil {
		return fmt.Errorf("entry %d of the log: %w", l.Index, err)
	}
	return s.db.Update(func(tx *bbolt.Tx) error {
		data := tx.Bucket(bucketData)
		var err error
		if c.Value == nil {
			err = data.Delete([]byte(c.Name))
		} else {
			err = data.Put([]byte(c.Name), c.Value)
		}
		if err != nil {
			return err
		}
		return tx.Bucket(bucketMeta).Put(keyApplied, key(l.Index))
	})
}

func (s *state) get(name string) (value []byte) {
	// A view fails only after the end, when nobody asks any more.
	_ = s.db.View(func(tx *bbolt.Tx) error {
		if v := tx.Bucket(bucketData).Get([]byte(name)); v != nil {
			value = append([]byte{}, v...)
		}
		return nil
	})
	return value
}

// applied is the last entry that is in the state.
func (s *state) applied() (n uint64) {
	_ = s.db.View(func(tx *bbolt.Tx) error {
		if v := tx.Bucket(bucketMeta).Get(keyApplied); v != nil {
			n = binary.BigEndian.Uint64(v)
		}
		return nil
	})
	return n
}

// copied is a state as it goes into a snapshot.
type copied struct {
	Applied uint64            `json:"applied"`
	Data    map[string][]byte `json:"data"`
}

func (s *state) copy() (c copied, err error) {
	c.Data = map[string][]byte{}
	err = s.db.View(func(tx *bbolt.Tx) error {
		if v := tx.Bucket(bucketMeta).Get(keyApplied); v != nil {
			c.Applied = binary.BigEndian.Uint64(v)
		}
		return tx.Bucket(bucketData).ForEach(func(k, v []byte) error {
			c.Data[string(k)] = append([]byte{}, v...)
			return nil
		})
	})
	return c, err
}

func (s *state) Snapshot() (raft.FSMSnapshot, error) { return s.copy() }

func (c copied) Persist(sink raft.SnapshotSink) error {
	if err := json.NewEncoder(sink).Encode(c); err != nil {
		_ = sink.Cancel()
		return err
	}
	return sink.Close()
}

func (copied) Release() {}

func (s *state) Restore(r io.ReadCloser) error {
	defer r.Close()
	var c copied
	if err := json.NewDecoder(r).Decode(&c); err != nil {
		return err
	}
	return s.db.Update(func(tx *bbolt.Tx) error {
		if err := tx.DeleteBucket(bucketData); err != nil {
			return err
		}
		data, err := tx.CreateBucket(bucketData)
		if err != nil {
			return err
		}
		for _, name := range slices.Sorted(maps.Keys(c.Data)) {
			if err := data.Put([]byte(name), c.Data[name]); err != nil {
				return err
			}
		}
		return tx.Bucket(bucketMeta).Put(keyApplied, key(c.Applied))
	})
}
