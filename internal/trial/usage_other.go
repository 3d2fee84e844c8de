//go:build !linux

package trial

import "time"

// usage is what a process has used; only Linux tells.
type usage struct {
	peak, now int64
	cpu       time.Duration
}

func usageOf(int) (usage, bool) { return usage{}, false }

func listener(int) int { return 0 }

func machine() string { return "" }
