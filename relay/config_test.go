package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/relay"
)

func TestConfigThatCannotWorkIsRefusedWithFieldAndValue(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cfg  relay.Config
		want []string
	}{
		"blank in topic":            {relay.Config{Topic: "order timeout"}, []string{"Topic", "order timeout"}},
		"negative tick":             {relay.Config{Tick: -time.Second}, []string{"Tick", "-1s"}},
		"tick below a millisecond":  {relay.Config{Tick: 1500 * time.Microsecond}, []string{"Tick", "1.5ms"}},
		"tick above a second":       {relay.Config{Tick: 2 * time.Second}, []string{"Tick", "2s"}},
		"too many orders":           {relay.Config{MaxOrdersPerMessage: 501}, []string{"MaxOrdersPerMessage", "501", "500"}},
		"negative orders":           {relay.Config{MaxOrdersPerMessage: -1}, []string{"MaxOrdersPerMessage", "-1"}},
		"claim too large":           {relay.Config{ClaimLimit: 10_001}, []string{"ClaimLimit", "10001", "10000"}},
		"less in hand than a claim": {relay.Config{MaxInHand: 10}, []string{"MaxInHand", "10"}},
		"no claimers":               {relay.Config{Claimers: -1}, []string{"Claimers", "-1"}},
		"no senders":                {relay.Config{Senders: -1}, []string{"Senders", "-1"}},
		"no markers":                {relay.Config{Markers: -1}, []string{"Markers", "-1"}},
		"negative lease":            {relay.Config{Lease: -1}, []string{"Lease"}},
		"negative poll":             {relay.Config{Poll: -1}, []string{"Poll"}},
		"negative stop":             {relay.Config{StopTimeout: -1}, []string{"StopTimeout"}},
		"send outlives the lease":   {relay.Config{Lease: 8 * time.Second}, []string{"Lease", "8s", "SendTimeout", "5s"}},
		"linger outlives the lease": {relay.Config{Linger: time.Minute}, []string{"Linger", "1m0s", "Lease"}},
		"backoff upside down":       {relay.Config{BackoffMin: time.Minute}, []string{"BackoffMax", "30s", "1m0s"}},
		"no delay at all":           {relay.Config{MaxDelay: time.Millisecond}, []string{"MaxDelay", "1ms"}},
		"purge too large":           {relay.Config{PurgeBatch: 501}, []string{"PurgeBatch", "501"}},
		"several":                   {relay.Config{Tick: -1, Senders: -1}, []string{"Tick", "Senders"}},
	} {
		_, err := relay.New(&outbox{}, &storedAtOnce{}, c.cfg)
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: error %q does not name %s", name, err, w)
			}
		}
	}
}

func TestZeroConfigHasTheDocumentedDefaults(t *testing.T) {
	t.Parallel()
	got := relay.Config{}.WithDefaults()
	got.Logger = nil
	want := relay.Config{
		Topic: "order-timeout", Tick: 100 * time.Millisecond, MaxOrdersPerMessage: 500, Linger: 200 * time.Millisecond,
		MaxDelay: 23*time.Hour + 50*time.Minute, Lease: 30 * time.Second, SendTimeout: 5 * time.Second, ClaimLimit: 5000, MaxInHand: 20_000,
		Claimers: 2, Senders: 8, Markers: 4, Poll: 100 * time.Millisecond, BackoffMin: 200 * time.Millisecond, BackoffMax: 30 * time.Second,
		PauseMax: 5 * time.Second, PurgeInterval: time.Minute, PurgeBatch: 500, StopTimeout: 10 * time.Second,
	}
	if got != want {
		t.Errorf("defaults are %+v, want %+v", got, want)
	}
	if _, err := relay.New(&outbox{}, &storedAtOnce{}, relay.Config{}); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
	if _, err := relay.New(nil, &storedAtOnce{}, relay.Config{}); err == nil {
		t.Error("a relay without an outbox is accepted")
	}
	if _, err := relay.New(&outbox{}, nil, relay.Config{}); err == nil {
		t.Error("a relay without a sender is accepted")
	}
}
