package why

import (
	"fmt"
	"time"
)

// words writes a duration as people say it, cut, not rounded: an order is not due before it is.
func words(d time.Duration) string {
	d = max(d, 0)
	two := func(whole int64, unit string, rest int64, restUnit string) string {
		if rest == 0 {
			return fmt.Sprintf("%d %s", whole, unit)
		}
		return fmt.Sprintf("%d %s %d %s", whole, unit, rest, restUnit)
	}
	switch seconds := int64(d / time.Second); {
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case seconds < 60:
		return fmt.Sprintf("%d s", seconds)
	case seconds < 600:
		return two(seconds/60, "min", seconds%60, "s")
	case seconds < 3600:
		return fmt.Sprintf("%d min", seconds/60)
	case seconds < 48*3600:
		return two(seconds/3600, "h", seconds%3600/60, "min")
	default:
		return two(seconds/86400, "days", seconds%86400/3600, "h")
	}
}

func when(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }

// on is the phrase for an instant that may not be known.
func on(t *time.Time) string {
	if t == nil {
		return ""
	}
	return " on " + when(*t)
}

// money writes minor units: how many of them make a unit depends on the currency, which is the shop's to name.
func money(amount int64, currency string) string { return fmt.Sprintf("%d %s", amount, currency) }

func times(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
