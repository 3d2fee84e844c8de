package reconcile

import (
	"strings"
	"testing"
	"time"
)

func mustSchedule(t *testing.T, expr, zone string) *schedule {
	t.Helper()
	s, err := parseSchedule(expr, zone)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// instants gives what a schedule has in [from, until), and holds that last agrees with after.
func (s *schedule) instants(t *testing.T, from, until time.Time) []time.Time {
	t.Helper()
	var list []time.Time
	for at := from.Add(-time.Second); ; {
		next, err := s.after(at)
		if err != nil {
			t.Fatal(err)
		}
		if !next.Before(until) {
			return list
		}
		for _, within := range []time.Duration{0, time.Second, 3 * time.Minute} {
			if last, err := s.last(next.Add(within)); err != nil || !last.Equal(next) {
				t.Errorf("the last time before %s is %s (%v), want %s", next.Add(within), last, err, next)
			}
		}
		list = append(list, next)
		at = next
	}
}

func instant(t *testing.T, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

func TestALocalDayRunsOnceWhateverItsHours(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, expr, zone, from, until string
		want                          []string
	}{
		{"an ordinary day", "30 2 * * *", "Europe/Berlin", "2026-06-01T00:00:00+02:00", "2026-06-03T00:00:00+02:00",
			[]string{"2026-06-01T02:30:00+02:00", "2026-06-02T02:30:00+02:00"}},
		{"a day without 02:30 runs when the clocks have been put forward", "30 2 * * *", "Europe/Berlin", "2026-03-28T00:00:00+01:00", "2026-03-31T00:00:00+02:00",
			[]string{"2026-03-28T02:30:00+01:00", "2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"}},
		{"a day of 25 hours has 02:30 twice and runs the first time", "30 2 * * *", "Europe/Berlin", "2026-10-24T00:00:00+02:00", "2026-10-27T00:00:00+01:00",
			[]string{"2026-10-24T02:30:00+02:00", "2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"}},
		{"half an hour forward", "15 2 * * *", "Australia/Lord_Howe", "2026-10-03T00:00:00+10:30", "2026-10-06T00:00:00+11:00",
			[]string{"2026-10-03T02:15:00+10:30", "2026-10-04T02:30:00+11:00", "2026-10-05T02:15:00+11:00"}},
		{"a day without midnight", "0 0 * * *", "America/Santiago", "2026-09-05T00:00:00-04:00", "2026-09-07T12:00:00-03:00",
			[]string{"2026-09-05T00:00:00-04:00", "2026-09-06T01:00:00-03:00", "2026-09-07T00:00:00-03:00"}},
		{"a whole day that a zone has skipped", "30 2 * * *", "Pacific/Apia", "2011-12-29T00:00:00-10:00", "2012-01-01T00:00:00+14:00",
			[]string{"2011-12-29T02:30:00-10:00", "2011-12-31T00:00:00+14:00", "2011-12-31T02:30:00+14:00"}},
		{"a zone without summer time", "30 2 * * *", "Asia/Shanghai", "2026-03-29T00:00:00+08:00", "2026-03-30T00:00:00+08:00",
			[]string{"2026-03-29T02:30:00+08:00"}},
		{"every six hours", "0 */6 * * *", "UTC", "2026-03-29T00:00:00Z", "2026-03-30T00:00:00Z",
			[]string{"2026-03-29T00:00:00Z", "2026-03-29T06:00:00Z", "2026-03-29T12:00:00Z", "2026-03-29T18:00:00Z"}},
		{"Mondays", "0 4 * * MON", "UTC", "2026-11-28T00:00:00Z", "2026-12-08T00:00:00Z",
			[]string{"2026-11-30T04:00:00Z", "2026-12-07T04:00:00Z"}},
		{"by name", "@daily", "UTC", "2026-11-30T00:00:00Z", "2026-12-01T00:00:00Z", []string{"2026-11-30T00:00:00Z"}},
		{"leap days only", "0 3 29 2 *", "UTC", "2026-01-01T00:00:00Z", "2033-01-01T00:00:00Z", []string{"2028-02-29T03:00:00Z", "2032-02-29T03:00:00Z"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			got := mustSchedule(t, c.expr, c.zone).instants(t, instant(t, c.from), instant(t, c.until))
			if len(got) != len(c.want) {
				t.Fatalf("it runs at %v, want %v", got, c.want)
			}
			for i := range got {
				if !got[i].Equal(instant(t, c.want[i])) {
					t.Errorf("run %d is at %s, want %s", i, got[i], c.want[i])
				}
			}
		})
	}
}

func TestAScheduleThatCannotBeMeantIsRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ expr, zone, names string }{
		{"2:30", "UTC", `"2:30"`},
		{"", "UTC", "five fields"},
		{"0 30 2 * * *", "UTC", "five fields"}, // with seconds
		{"30 2 * * * 2026", "UTC", "five fields"},
		{"61 2 * * *", "UTC", `"61 2 * * *"`},
		{"30 2 * *", "UTC", "five fields"},
		{"@everysecond", "UTC", "five fields"},
		{"@fortnightly", "UTC", "five fields"},
		{"0 0 31 2 *", "UTC", "never comes"},
		{"30 2 * * *", "Mars/Olympus", "Mars/Olympus"},
		{"30 2 * * *", "", "time zone"},
	} {
		if err := CheckSchedule(c.expr, c.zone); err == nil || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%q in %q: %v, want an error with %s", c.expr, c.zone, err, c.names)
		}
	}
}
