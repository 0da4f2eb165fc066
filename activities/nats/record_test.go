package nats

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestARollThatKeptEverythingPassesAndTheEmptiedOnesAreNoticed(t *testing.T) {
	// From the recording after the raise: KEEP1 is the only memory stream with
	// one copy. It held messages, so its emptying is a loss.
	saved := save(Place{}, Judge(recorded(t, "raised")))
	c, err := compare(recorded(t, "rolled"), saved)
	require.NoError(t, err)
	require.Empty(t, c.waiting)
	require.Len(t, c.lost, 1)
	require.Equal(t, "stream NVCF/KEEP1", c.lost[0].Object)
	require.Equal(t, "0 messages (sequence 0 to 0)", c.lost[0].Found)

	// Drained before, nothing was in it to lose.
	for i := range saved.Streams {
		if s := &saved.Streams[i]; s.Name == "KEEP1" {
			s.State = State{FirstSeq: 2001, LastSeq: 2000}
		}
	}
	c, err = compare(recorded(t, "rolled"), saved)
	require.NoError(t, err)
	require.Empty(t, c.lost)
	require.Equal(t, []string{"NVCF/KEEP1"}, c.emptied)

	// The next server was restarted before the one before had recovered: all
	// replicas read current, three memory streams are empty.
	c, err = compare(recorded(t, "rolled-too-fast"), saved)
	require.NoError(t, err)
	var lost []string
	for _, f := range c.lost {
		lost = append(lost, f.Object)
	}
	require.Equal(t, []string{"stream NVCF/M1", "stream NVCF/M2", "stream NVCF/M3"}, lost)
}

func TestNothingIsCalledLostWhileAServerIsAway(t *testing.T) {
	saved := save(Place{}, Judge(recorded(t, "raised")))
	c, err := compare(recorded(t, "two-down"), saved)
	require.NoError(t, err)
	require.Empty(t, c.lost)
	require.NotEmpty(t, c.waiting)
}

func TestAMissingStreamAndAChangedSettingAreNamed(t *testing.T) {
	saved := save(Place{}, Judge(recorded(t, "raised")))
	saved.Streams = append(saved.Streams, SavedStream{Record: Record{Account: "NVCF", AccountID: "NVCF", Name: "TerminateNvcaStream"}})
	saved.Streams[0].Config = json.RawMessage(`{"name":"F1","storage":"file","num_replicas":3,"max_msgs":100}`)
	c, err := compare(recorded(t, "rolled"), saved)
	require.NoError(t, err)
	var found []string
	for _, f := range c.waiting {
		found = append(found, f.Object+": "+f.Found)
	}
	require.Contains(t, found, "stream NVCF/TerminateNvcaStream: no server lists it")
	require.Contains(t, found, "stream NVCF/F1: max_msgs was 100 and is -1")
}

func TestAPodThatIsNotReadyIsWaitedFor(t *testing.T) {
	answers := recorded(t, "rolled")
	answers[1].Unready = "container nats waits: ImagePullBackOff"
	c, err := compare(answers, Saved{})
	require.NoError(t, err)
	require.Len(t, c.waiting, 1)
	require.Equal(t, "N157", c.waiting[0].Row)
}

func TestConfigurationIsComparedBySetting(t *testing.T) {
	for name, c := range map[string]struct {
		before, after string
		want          []string
	}{
		"same in another order":           {`{"a":1,"b":["x"]}`, `{"b":["x"],"a":1}`, nil},
		"raised by its service":           {`{"num_replicas":1}`, `{"num_replicas":3}`, nil},
		"lowered":                         {`{"num_replicas":3}`, `{"num_replicas":1}`, []string{"num_replicas was 3 and is 1"}},
		"a newer server adds its default": {`{}`, `{"allow_msg_ttl":false,"consumer_limits":{}}`, nil},
		"a new setting that does a thing": {`{}`, `{"sealed":true}`, []string{"sealed was absent and is true"}},
		"the server's own metadata":       {`{"metadata":{"_nats.ver":"2.14","team":"a"}}`, `{"metadata":{"_nats.ver":"2.15","team":"a"}}`, nil},
		"metadata of people":              {`{"metadata":{"team":"a"}}`, `{"metadata":{"team":"b"}}`, []string{`metadata was {"team":"a"} and is {"team":"b"}`}},
		"a setting that is gone":          {`{"max_age":5}`, `{}`, []string{"max_age was 5 and is absent"}},
		"numbers keep every digit":        {`{"max_bytes":9007199254740993}`, `{"max_bytes":9007199254740992}`, []string{"max_bytes was 9007199254740993 and is 9007199254740992"}},
	} {
		got, err := drift(json.RawMessage(c.before), json.RawMessage(c.after))
		require.NoError(t, err, name)
		require.Equal(t, c.want, got, name)
	}
}

func TestCountsMustBeEqualOnlyWhereNobodyPublished(t *testing.T) {
	state := func(m, first, last uint64) State { return State{Messages: m, FirstSeq: first, LastSeq: last} }
	for name, c := range map[string]struct {
		before, after State
		leaving       bool
		lost          bool
	}{
		"unchanged":                        {state(10, 1, 10), state(10, 1, 10), false, false},
		"published meanwhile":              {state(10, 1, 10), state(15, 1, 15), false, false},
		"published and trimmed":            {state(10, 1, 10), state(5, 11, 15), false, false},
		"fewer, and nobody published":      {state(10, 1, 10), state(9, 1, 10), false, true},
		"a work queue that was worked on":  {state(10, 1, 10), state(2, 9, 10), true, false},
		"the sequence went back":           {state(10, 1, 10), state(3, 1, 3), true, true},
		"emptied":                          {state(10, 1, 10), state(0, 0, 0), false, true},
		"the first sequence went back":     {state(10, 5, 14), state(20, 1, 20), false, true},
		"drained, and its sequence is new": {state(0, 11, 10), state(0, 0, 0), false, true},
	} {
		_, lost := Lost(Record{State: c.before, Leaving: c.leaving}, Stream{State: c.after})
		require.Equal(t, c.lost, lost, name)
	}
	_, lost := Lost(Record{Created: time.Unix(1, 0)}, Stream{Created: time.Unix(2, 0)})
	require.True(t, lost, "created anew")
}

func TestAStreamThatWasEmptiedAndFilledAnewIsLost(t *testing.T) {
	then := time.Unix(100, 0)
	before := Record{State: State{Messages: 10, FirstSeq: 1, LastSeq: 10, FirstTime: then}}
	after := State{Messages: 12, FirstSeq: 1, LastSeq: 12, FirstTime: then}
	_, lost := Lost(before, Stream{State: after})
	require.False(t, lost, "its first message is the one it was")
	after.FirstTime = then.Add(time.Minute)
	f, lost := Lost(before, Stream{State: after})
	require.True(t, lost, "publishers were quick: its sequence is beyond what it was")
	require.Contains(t, f.Found, "the first of them from 1970-01-01T00:02:40")
	_, lost = Lost(Record{State: State{FirstSeq: 1}}, Stream{State: after})
	require.False(t, lost, "nothing was in it")
}

func TestAReplicatedStreamMustNotHoldFewerMessagesAfterARoll(t *testing.T) {
	saved := save(Place{}, Judge(recorded(t, "raised")))
	at := slices.IndexFunc(saved.Streams, func(s SavedStream) bool { return s.Name == "M1" })
	require.Equal(t, 3, saved.Streams[at].Replicas)
	holds := saved.Streams[at].State
	saved.Streams = saved.Streams[at : at+1]
	s := &saved.Streams[0]
	s.State.Messages, s.State.LastSeq = holds.Messages+5, holds.LastSeq-5 // five were published since, and ten are gone
	judge := func() comparison {
		c, err := compare(recorded(t, "rolled"), saved)
		require.NoError(t, err)
		return c
	}
	require.Len(t, judge().lost, 1)
	s.Bounded = true
	require.Empty(t, judge().lost, "new ones have taken their place")
	s.Bounded, s.Leaving = false, true
	require.Empty(t, judge().lost, "they were worked off")
	s.Leaving, s.Replicas = false, 1
	require.Empty(t, judge().lost, "one copy promises nothing")
}

func TestLimitsOfAStreamSayWhetherItsMessagesStay(t *testing.T) {
	for name, c := range map[string]struct {
		config           string
		leaving, bounded bool
	}{
		"no limit":              {`{"storage":"file","retention":"limits","max_msgs":-1,"max_bytes":-1,"max_msgs_per_subject":-1}`, false, false},
		"a work queue":          {`{"storage":"memory","retention":"workqueue"}`, true, false},
		"an age":                {`{"storage":"file","max_age":1000}`, true, false},
		"a number":              {`{"storage":"file","max_msgs":5}`, false, true},
		"a size":                {`{"storage":"file","max_bytes":5}`, false, true},
		"the last of a subject": {`{"storage":"file","max_msgs_per_subject":1}`, false, true},
		"rollups":               {`{"storage":"file","allow_rollup_hdrs":true}`, false, true},
	} {
		h := Hosted{Config: json.RawMessage(c.config)}
		require.NoError(t, h.read(), name)
		r := Stream{settings: h.config}.record()
		require.Equal(t, c.leaving, r.Leaving, name)
		require.Equal(t, c.bounded, r.Bounded, name)
	}
}

func TestAReplicaOrLeaderThatFlapsBeginsTheWaitAnew(t *testing.T) {
	before := []Record{{Account: "A", AccountID: "A", Name: "S"}}
	led := func(leader string) View {
		return View{Streams: []Stream{{Account: "A", AccountID: "A", Name: "S", Leader: leader}}}
	}
	var calm steady
	at := func(seconds int) time.Time { return time.Unix(int64(seconds), 0) }
	calmFor := func(from, to int, leader string) time.Duration {
		held := time.Duration(0)
		for s := from; s <= to; s++ {
			held = calm.look(at(s), led(leader), before, true)
		}
		return held
	}
	require.Equal(t, 9*time.Second, calmFor(0, 9, "a"))
	require.Zero(t, calm.look(at(10), led("a"), before, false), "a replica is behind for one look")
	require.Equal(t, 8*time.Second, calmFor(11, 19, "a"))
	require.Zero(t, calm.look(at(20), led("b"), before, true), "another leader")
	require.Equal(t, 10*time.Second, calmFor(20, 30, "b"))
	require.Zero(t, calm.look(at(36), led("b"), before, true), "nobody knows what was between two looks that are far apart")
	require.Equal(t, 10*time.Second, calmFor(37, 46, "b"))
}

func TestAQueueThatBeganAnewIsLostAndNotDrained(t *testing.T) {
	_, held := emptied(Judge(recorded(t, "single")), nil)
	require.Len(t, held, 4, "single copies in memory, all with messages")

	// Worked off: the sequence stays. A purge of a work queue looks the same, so
	// nobody is told of it (docs/nats.md).
	v := Judge(recorded(t, "single"))
	for i := range v.Streams {
		v.Streams[i].State.Messages, v.Streams[i].State.FirstSeq, v.Streams[i].Retention = 0, v.Streams[i].State.LastSeq+1, "workqueue"
	}
	worked := make([]Record, len(held))
	for i, b := range held {
		worked[i] = b
		worked[i].Leaving = true
	}
	lost, now := emptied(v, worked)
	require.Empty(t, lost)
	require.Empty(t, now)

	// Nobody took them out, no consumer could: a purge.
	lost, _ = emptied(v, held)
	require.Len(t, lost, 4)

	// A restart of the server.
	v = Judge(recorded(t, "single"))
	for i := range v.Streams {
		v.Streams[i].State = State{}
	}
	lost, now = emptied(v, held)
	require.Len(t, lost, 4)
	require.Equal(t, "N124", lost[0].Row)
	require.Equal(t, "stream NVCF/KEEP1", lost[0].Object)
	require.Equal(t, "nothing lost of 2000 messages (sequence 1 to 2000)", lost[0].Expected)
	require.Empty(t, now, "it is told once")

	// Gone altogether.
	v.Streams = nil
	lost, _ = emptied(v, held)
	require.Equal(t, "no server lists it", lost[0].Found)

	// A server that is away may hold them still.
	lost, now = emptied(Judge(recorded(t, "two-down")), held)
	require.Empty(t, lost)
	require.GreaterOrEqual(t, len(now), len(held))
}
