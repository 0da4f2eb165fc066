package openbao

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"
	"go.etcd.io/bbolt"
)

// logStore keeps Raft's log and its few variables in one file.
type logStore struct{ db *bbolt.DB }

var (
	bucketLogs   = []byte("logs")
	bucketStable = []byte("stable")
)

// openLimit bounds the wait for a process that still holds the file.
const openLimit = 10 * time.Second

func openBolt(path string, buckets ...[]byte) (*bbolt.DB, error) {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: openLimit})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, b := range buckets {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

func openLog(path string) (*logStore, error) {
	db, err := openBolt(path, bucketLogs, bucketStable)
	return &logStore{db}, err
}

func key(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func (s *logStore) edge(at func(*bbolt.Cursor) ([]byte, []byte)) (n uint64, err error) {
	err = s.db.View(func(tx *bbolt.Tx) error {
		if k, _ := at(tx.Bucket(bucketLogs).Cursor()); k != nil {
			n = binary.BigEndian.Uint64(k)
		}
		return nil
	})
	return n, err
}

func (s *logStore) FirstIndex() (uint64, error) { return s.edge((*bbolt.Cursor).First) }
func (s *logStore) LastIndex() (uint64, error)  { return s.edge((*bbolt.Cursor).Last) }

func (s *logStore) GetLog(index uint64, log *raft.Log) error {
	return s.db.View(func(tx *bbolt.Tx) error {
		data := tx.Bucket(bucketLogs).Get(key(index))
		if data == nil {
			return raft.ErrLogNotFound
		}
		return json.Unmarshal(data, log)
	})
}

func (s *logStore) StoreLog(log *raft.Log) error { return s.StoreLogs([]*raft.Log{log}) }

func (s *logStore) StoreLogs(logs []*raft.Log) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		for _, l := range logs {
			data, err := json.Marshal(l)
			if err != nil {
				return err
			}
			if err := tx.Bucket(bucketLogs).Put(key(l.Index), data); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *logStore) DeleteRange(from, to uint64) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bucketLogs).Cursor()
		for k, _ := c.Seek(key(from)); k != nil && binary.BigEndian.Uint64(k) <= to; k, _ = c.Next() {
			if err := c.Delete(); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *logStore) Set(k, v []byte) error {
	return s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucketStable).Put(k, v) })
}

func (s *logStore) Get(k []byte) (v []byte, err error) {
	err = s.db.View(func(tx *bbolt.Tx) error {
		v = append([]byte{}, tx.Bucket(bucketStable).Get(k)...)
		return nil
	})
	return v, err
}

func (s *logStore) SetUint64(k []byte, v uint64) error { return s.Set(k, key(v)) }

func (s *logStore) GetUint64(k []byte) (uint64, error) {
	v, err := s.Get(k)
	if err != nil || len(v) == 0 {
		return 0, err
	}
	return binary.BigEndian.Uint64(v), nil
}
