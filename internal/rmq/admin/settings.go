package admin

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// LongestDelay is the farthest that lapse has a message delivered: the default maximum of the proxy. Longer deadlines go in hops.
const LongestDelay = 24 * time.Hour

// maxDelaySeconds is the largest timerMaxDelaySec that the broker can multiply by 1,000 in its 32-bit arithmetic. With more it refuses
// every timed message (apache/rocketmq#5376).
const maxDelaySeconds = 2_147_483

// settings that lose timed messages, or stop them, with any other value than this. The reasons stand in configs/rocketmq/broker.conf.
var settings = []struct{ key, want string }{
	{"timerEnableRetryUntilSuccess", "true"},
	{"timerWheelEnable", "true"},
	{"timerSkipUnknownError", "false"},
	{"timerRocksDBEnable", "false"},
	{"cleanFileForciblyEnable", "false"},
	{"autoCreateTopicEnable", "false"},
	{"autoCreateSubscriptionGroup", "false"},
}

// CheckSettings says which of a broker's settings would lose timed messages: of a file ([ParseSettings]) or in force
// ([Client.BrokerConfig]). The error names each with its value and what is wanted; nil: none. A key that is missing is one of them,
// since the broker's own defaults lose messages.
func CheckSettings(config map[string]string) error {
	var errs []error
	for _, s := range settings {
		if got := config[s.key]; got != s.want {
			errs = append(errs, fmt.Errorf("%s=%q, want %q", s.key, got, s.want))
		}
	}
	number := func(key string, low, high int64, why string) {
		n, err := strconv.ParseInt(config[key], 10, 64)
		if err != nil || n < low || n > high {
			errs = append(errs, fmt.Errorf("%s=%q, want %d to %d: %s", key, config[key], low, high, why))
		}
	}
	number("timerMaxDelaySec", int64(LongestDelay/time.Second)+1, maxDelaySeconds, "below, the longest deadlines are refused; above, the broker's arithmetic overflows and it refuses every timed message")
	// Twice: the longest delay, and an outage as long.
	number("fileReservedTime", 2*int64(LongestDelay/time.Hour), 24*365, "hours that the files with the pending messages are kept")
	number("diskMaxUsedSpaceRatio", 1, 75, "percent of the disk above which those files go at any hour")
	return errors.Join(errs...)
}

// ParseSettings reads a broker.conf. It refuses what the broker drops or misreads without a word: a line without "=", a key that is
// there twice, blanks at the end of a value, and comments behind one.
func ParseSettings(r io.Reader) (map[string]string, error) {
	config := map[string]string{}
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line := lines.Text()
		if trimmed := strings.TrimSpace(line); trimmed == "" || strings.HasPrefix(trimmed, "#") || strings.HasPrefix(trimmed, "!") {
			continue
		}
		key, value, found := strings.Cut(line, "=")
		key = strings.TrimSpace(key)
		_, twice := config[key]
		switch {
		case !found:
			return nil, fmt.Errorf("line %d: %q is no key=value", n, line)
		case twice:
			return nil, fmt.Errorf("line %d: %s is there twice", n, key)
		case strings.TrimRight(value, " \t") != value:
			return nil, fmt.Errorf("line %d: the value of %s ends with a blank", n, key)
		case strings.Contains(value, " #"):
			return nil, fmt.Errorf("line %d: the value of %s would have the comment in it", n, key)
		}
		config[key] = strings.TrimSpace(value)
	}
	return config, lines.Err()
}
