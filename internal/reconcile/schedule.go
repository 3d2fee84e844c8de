package reconcile

import (
	"fmt"
	"strings"
	"time"

	"github.com/adhocore/gronx"
)

// schedule is a cron expression in the wall clock of a zone. The expression is worked out as if there were no time zones at all, and each of its
// wall times is then looked up in the zone. So a wall time is one instant, also on a day of 23 or 25 hours, where working on instants would
// leave it out or take it twice.
type schedule struct {
	expr string
	zone *time.Location
}

// CheckSchedule tells whether an expression and a zone can be used; the error names what is wrong with them.
func CheckSchedule(expr, zone string) error {
	_, err := parseSchedule(expr, zone)
	return err
}

func parseSchedule(expr, zone string) (*schedule, error) {
	loc, err := time.LoadLocation(zone)
	if err != nil || zone == "" {
		return nil, fmt.Errorf("the time zone %q is not known: write a name such as Asia/Shanghai, UTC, or Local for the zone of the process", zone)
	}
	trimmed := strings.TrimSpace(expr)
	// Seconds and years, which the parser would take, make a schedule that is read wrongly by everybody who knows cron.
	if !strings.HasPrefix(trimmed, "@") && len(strings.Fields(trimmed)) != 5 || !gronx.IsValid(trimmed) || strings.EqualFold(trimmed, "@everysecond") {
		return nil, fmt.Errorf("the schedule %q cannot be read: write the five fields of cron, minute hour day month weekday, such as \"30 2 * * *\", or @daily", expr)
	}
	s := &schedule{expr: trimmed, zone: loc}
	if _, err := gronx.NextTickAfter(s.expr, time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC), false); err != nil {
		return nil, fmt.Errorf("the schedule %q never comes: %w", expr, err)
	}
	return s, nil
}

// most is more than any zone has ever put its clocks forward or back.
const most = 26 * time.Hour

// after gives the first instant of the schedule that is later than t.
func (s *schedule) after(t time.Time) (time.Time, error) {
	wall := s.wall(t).Add(-most)
	for {
		next, err := gronx.NextTickAfter(s.expr, wall, false)
		if err != nil {
			return time.Time{}, fmt.Errorf("find the next time of schedule %q: %w", s.expr, err)
		}
		if at := s.instant(next); at.After(t) {
			return at, nil
		}
		wall = next
	}
}

// last gives the latest instant of the schedule that is not later than t.
func (s *schedule) last(t time.Time) (time.Time, error) {
	wall := s.wall(t).Add(most)
	for {
		before, err := gronx.PrevTickBefore(s.expr, wall, false)
		if err != nil {
			return time.Time{}, fmt.Errorf("find the last time of schedule %q: %w", s.expr, err)
		}
		if at := s.instant(before); !at.After(t) {
			return at, nil
		}
		wall = before
	}
}

// wall is what the clocks of the zone show, written as if it were UTC.
func (s *schedule) wall(t time.Time) time.Time {
	t = t.In(s.zone)
	return time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), t.Second(), 0, time.UTC)
}

// instant is when the clocks of the zone first show a wall time, or, where they skip it, the moment in which they are put forward.
func (s *schedule) instant(wall time.Time) time.Time {
	// The clocks show no less than wall from some instant between these two on; they may show it again later.
	low, high := wall.Add(-most), wall.Add(most)
	// A clock that is put back makes "shows no less" true, false and true again, so the first of these stretches is looked for.
	for t := low; t.Before(high); t = t.Add(15 * time.Minute) { // no zone changes its clocks twice in that time
		if !s.wall(t.Add(15 * time.Minute)).Before(wall) {
			low, high = t, t.Add(15*time.Minute)
			break
		}
	}
	for high.Sub(low) > time.Second {
		middle := low.Add(high.Sub(low) / 2)
		if s.wall(middle).Before(wall) {
			low = middle
		} else {
			high = middle
		}
	}
	return high.Truncate(time.Second)
}
