package admin

import (
	"maps"
	"os"
	"strings"
	"testing"
)

func shipped(t *testing.T) map[string]string {
	t.Helper()
	f, err := os.Open("../../../configs/rocketmq/broker.conf")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read
	config, err := ParseSettings(f)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// case PRD-6: message files are kept for longer than the longest delay.
func TestTheShippedBrokerSettingsLoseNothing(t *testing.T) {
	t.Parallel()
	if err := CheckSettings(shipped(t)); err != nil {
		t.Error(err)
	}
}

func TestSettingsThatLoseTimedMessagesAreNamed(t *testing.T) {
	t.Parallel()
	for key, value := range map[string]string{
		"timerMaxDelaySec":             "2147484", // case MQ-8
		"fileReservedTime":             "24",
		"diskMaxUsedSpaceRatio":        "90",
		"timerEnableRetryUntilSuccess": "true ",
		"timerWheelEnable":             "false",
		"timerSkipUnknownError":        "true",
		"timerRocksDBEnable":           "true",
		"cleanFileForciblyEnable":      "true",
		"autoCreateTopicEnable":        "",
		"autoCreateSubscriptionGroup":  "true",
	} {
		t.Run(key, func(t *testing.T) {
			t.Parallel()
			config := maps.Clone(shipped(t))
			config[key] = value
			err := CheckSettings(config)
			if err == nil || !strings.Contains(err.Error(), key+`="`+value+`"`) || strings.Count(err.Error(), "want") != 1 {
				t.Errorf("%s=%q: the error is %v", key, value, err)
			}
			delete(config, key)
			if err := CheckSettings(config); err == nil {
				t.Errorf("nothing is said of a missing %s, whose default loses messages", key)
			}
		})
	}
}

func TestAFileThatTheBrokerWouldMisreadIsRefused(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"blank at the end": "timerWheelEnable=true \n",
		"trailing comment": "timerWheelEnable=true # needed\n",
		"no value":         "timerWheelEnable\n",
		"twice":            "listenPort=1\nlistenPort=2\n",
	} {
		if _, err := ParseSettings(strings.NewReader(text)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
