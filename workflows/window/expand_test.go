package window_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/workflows/window"
)

const layout = "2006-01-02 15:04Z07:00"

func at(t *testing.T, s string) time.Time {
	t.Helper()
	v, err := time.Parse(layout, s)
	require.NoError(t, err)
	return v
}

func spec(opens string, d time.Duration, zone string, exclude ...string) window.Spec {
	return window.Spec{Opens: opens, Duration: window.Duration(d), TimeZone: zone, Exclude: exclude}
}

func TestExpand(t *testing.T) {
	const h = time.Hour
	cases := []struct {
		name        string
		specs       []window.Spec
		from, until string
		want        [][2]string
	}{
		{
			"every night in a zone", []window.Spec{spec("0 22 * * *", 2*h, "Europe/Berlin")},
			"2026-03-02 08:00Z", "2026-03-04 00:00Z",
			[][2]string{{"2026-03-02 21:00Z", "2026-03-02 23:00Z"}, {"2026-03-03 21:00Z", "2026-03-03 23:00Z"}},
		},
		{
			"one that is open already", []window.Spec{spec("0 22 * * *", 12*h, "")},
			"2026-03-02 08:00Z", "2026-03-02 12:00Z",
			[][2]string{{"2026-03-01 22:00Z", "2026-03-02 10:00Z"}},
		},
		{
			"one that has just closed is over", []window.Spec{spec("0 6 * * *", 2*h, "")},
			"2026-03-02 08:00Z", "2026-03-02 12:00Z", nil,
		},
		{
			"weekends without an excluded day", []window.Spec{spec("0 10 * * 6,0", h, "Asia/Tokyo", "2026-03-08")},
			"2026-03-02 00:00Z", "2026-03-16 00:00Z",
			[][2]string{{"2026-03-07 01:00Z", "2026-03-07 02:00Z"}, {"2026-03-14 01:00Z", "2026-03-14 02:00Z"}, {"2026-03-15 01:00Z", "2026-03-15 02:00Z"}},
		},
		{
			"an excluded day is one of the zone", []window.Spec{spec("0 1 * * *", h, "Asia/Tokyo", "2026-03-03")},
			"2026-03-02 00:00Z", "2026-03-04 00:00Z",
			[][2]string{{"2026-03-03 16:00Z", "2026-03-03 17:00Z"}},
		},
		{
			"overlapping and touching ones merge", []window.Spec{spec("0 1 * * *", 2*h, ""), spec("0 2 * * *", 2*h, ""), spec("0 4 * * *", h, "")},
			"2026-03-02 00:00Z", "2026-03-03 00:00Z",
			[][2]string{{"2026-03-02 01:00Z", "2026-03-02 05:00Z"}},
		},
		{
			"an hour that the clocks skip opens at the skip", []window.Spec{spec("30 2 * * *", h, "America/New_York")},
			"2026-03-07 12:00Z", "2026-03-09 12:00Z",
			[][2]string{{"2026-03-08 07:00Z", "2026-03-08 08:00Z"}, {"2026-03-09 06:30Z", "2026-03-09 07:30Z"}},
		},
		{
			"an hour that the clocks show twice opens once, at the first", []window.Spec{spec("30 1 * * *", h, "America/New_York")},
			"2026-11-01 00:00Z", "2026-11-02 12:00Z",
			[][2]string{{"2026-11-01 05:30Z", "2026-11-01 06:30Z"}, {"2026-11-02 06:30Z", "2026-11-02 07:30Z"}},
		},
		{
			"a skipped midnight opens at the skip", []window.Spec{spec("0 0 * * *", h, "America/Santiago")},
			"2026-09-05 12:00Z", "2026-09-06 12:00Z",
			[][2]string{{"2026-09-06 04:00Z", "2026-09-06 05:00Z"}},
		},
		{
			"the duration is elapsed time across a change", []window.Spec{spec("0 0 * * 0", 6*h, "Europe/Berlin")},
			"2026-03-28 12:00Z", "2026-03-29 12:00Z",
			[][2]string{{"2026-03-28 23:00Z", "2026-03-29 05:00Z"}},
		},
		{
			"every hour follows elapsed time through a repeated hour", []window.Spec{spec("0 * * * *", 10*time.Minute, "America/New_York")},
			"2026-11-01 05:00Z", "2026-11-01 08:00Z",
			[][2]string{{"2026-11-01 05:00Z", "2026-11-01 05:10Z"}, {"2026-11-01 06:00Z", "2026-11-01 06:10Z"}, {"2026-11-01 07:00Z", "2026-11-01 07:10Z"}},
		},
		{"never", []window.Spec{spec("0 0 31 2 *", h, "")}, "2026-03-02 00:00Z", "2027-03-02 00:00Z", nil},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := window.Expand(c.specs, at(t, c.from), at(t, c.until))
			require.NoError(t, err)
			var shown [][2]string
			for _, in := range got {
				shown = append(shown, [2]string{in.Start.Format(layout), in.End.Format(layout)})
			}
			assert.Equal(t, c.want, shown)
		})
	}
}

func TestValidateNamesEveryProblem(t *testing.T) {
	cases := []struct {
		name string
		spec window.Spec
		want []string
	}{
		{"all at once", spec("at night", 0, "Mars/Olympus", "tomorrow"), []string{"five cron fields", "duration 0s", "Mars/Olympus", `exclude "tomorrow"`}},
		{"zone in the expression", spec("TZ=UTC 0 1 * * *", time.Hour, ""), []string{"name the time zone in timeZone"}},
		{"descriptor", spec("@daily", time.Hour, ""), []string{"five cron fields"}},
		{"local zone", spec("0 1 * * *", time.Hour, "Local"), []string{"workers differ"}},
		{"longer than a month", spec("0 1 * * *", 1000*time.Hour, ""), []string{"want between 1m"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for _, want := range c.want {
				assert.ErrorContains(t, c.spec.Validate(), want)
			}
			_, err := window.Expand([]window.Spec{spec("0 1 * * *", time.Hour, ""), c.spec}, time.Time{}, time.Time{})
			assert.ErrorContains(t, err, "windows[1]: ")
		})
	}
	assert.NoError(t, spec("0 22 * * 1-5", 2*time.Hour, "Europe/Berlin", "2026-12-24").Validate())
}

func TestExpandedWindowsAreSortedDisjointAndAgreeWithTheWallClock(t *testing.T) {
	zones := []string{"", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "Asia/Kolkata", "Pacific/Apia"}
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		zone := zones[rnd.IntN(len(zones))]
		loc, err := time.LoadLocation(zone)
		require.NoError(t, err)
		hour, minute := rnd.IntN(24), rnd.IntN(60)
		s := spec(time.Date(2026, 1, 1, hour, minute, 0, 0, time.UTC).Format("4 15")+" * * *", time.Duration(1+rnd.IntN(300))*time.Minute, zone)
		from := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).Add(time.Duration(rnd.IntN(365*24)) * time.Hour)
		got, err := window.Expand([]window.Spec{s}, from, from.AddDate(0, 0, 30))
		require.NoError(t, err)
		require.GreaterOrEqual(t, len(got), 29, "seed %d", seed)
		for i, in := range got {
			require.True(t, in.End.After(from), "seed %d", seed)
			require.True(t, i == 0 || in.Start.After(got[i-1].End), "seed %d", seed)
			require.Equal(t, s.Duration.D(), in.End.Sub(in.Start), "seed %d", seed)
			shown := in.Start.In(loc)
			if shown.Hour() != hour || shown.Minute() != minute {
				_, before := shown.Add(-time.Minute).Zone()
				_, after := shown.Zone()
				require.Greater(t, after, before, "seed %d: %s is neither the hour asked for nor a skip", seed, shown)
			}
		}
	}
}

func TestOpenFitsNext(t *testing.T) {
	iv := func(from, to string) window.Interval {
		return window.Interval{Start: at(t, from), End: at(t, to)}
	}
	all := []window.Interval{iv("2026-03-02 01:00Z", "2026-03-02 02:00Z"), iv("2026-03-03 01:00Z", "2026-03-03 04:00Z")}
	cases := []struct {
		now      string
		estimate time.Duration
		open     bool
		fits     bool
		next     string
	}{
		{"2026-03-02 00:59Z", time.Hour, false, false, "2026-03-02 01:00Z"},
		{"2026-03-02 01:00Z", time.Hour, true, true, "2026-03-03 01:00Z"},
		{"2026-03-02 01:01Z", time.Hour, true, false, "2026-03-03 01:00Z"},
		{"2026-03-02 02:00Z", 0, false, false, "2026-03-03 01:00Z"},
		{"2026-03-02 00:00Z", 2 * time.Hour, false, false, "2026-03-03 01:00Z"},
		{"2026-03-03 01:30Z", 4 * time.Hour, true, false, ""},
	}
	for _, c := range cases {
		now := at(t, c.now)
		assert.Equal(t, c.open, window.Open(all, now), c.now)
		assert.Equal(t, c.fits, window.Fits(all, now, c.estimate), c.now)
		next, ok := window.Next(all, now, c.estimate)
		assert.Equal(t, c.next != "", ok, c.now)
		if ok {
			assert.Equal(t, c.next, next.Start.Format(layout), c.now)
		}
	}
}
