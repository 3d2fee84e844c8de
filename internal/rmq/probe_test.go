package rmq

import (
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest"
)

func openProbe(t *testing.T, cfg Config) *Probe {
	t.Helper()
	p, err := NewProbe(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// What the probe knows better than the official client: how often a group delivers, and when the broker's timer fired. The same on the
// embedded endpoint and on the real broker.
func TestProbeSeesAttemptsAndTheMomentOfATimer(t *testing.T) {
	t.Parallel()
	for name, setUp := range map[string]func(t *testing.T) (cfg Config, topic, group string){
		"embedded": func(t *testing.T) (Config, string, string) {
			b := lapsetest.Start(t)
			b.CreateTopic("topic", lapsetest.Delay, 8)
			b.CreateGroup("group", 7)
			return Config{Endpoints: b.Endpoint(), TLS: TLS{Disabled: true}}, "topic", "group"
		},
		"real": func(t *testing.T) (Config, string, string) {
			b := stacktest.Shared(t)
			return realConfig(t, b), b.NewTopic(t, admin.Delay), b.NewGroup(t, 7)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, topic, group := setUp(t)
			p := openProbe(t, cfg)
			types, err := p.TopicTypes(t.Context(), topic)
			if err != nil || len(types) != 1 || types[0] != TopicDelay {
				t.Errorf("the topic takes %v, %v, want DELAY", types, err)
			}
			v, err := p.Visit(t.Context(), group, topic)
			if err != nil {
				t.Fatal(err)
			}
			defer v.Leave()
			if v.Attempts != 8 {
				t.Errorf("the group delivers %d times, want 8", v.Attempts)
			}
			begun := time.Now().Truncate(time.Millisecond)
			if _, err := v.Send(t.Context(), "at once", begun.Add(-time.Minute)); err != nil {
				t.Fatal(err)
			}
			sent := time.Now()
			due := begun.Add(2 * time.Second)
			if _, err := v.Send(t.Context(), "later", due); err != nil {
				t.Fatal(err)
			}
			got := map[string]Stored{}
			for limit := time.Now().Add(30 * time.Second); len(got) < 2; {
				if time.Now().After(limit) {
					t.Fatalf("received %v", got)
				}
				ms, err := v.Receive(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				for _, m := range ms {
					got[m.Body] = m
					if err := v.Ack(t.Context(), m); err != nil {
						t.Error(err)
					}
				}
			}
			// One machine, one clock.
			if s := got["at once"].StoredAt; s.Before(begun) || s.After(sent) {
				t.Errorf("the message due in the past was stored %s, sent from %s to %s", s, begun, sent)
			}
			if m := got["later"]; m.StoredAt.Before(due) || m.StoredAt.After(m.ReceivedAt) || !m.DeliverAt.Equal(due) {
				t.Errorf("the message due %s was stored %s and received %s, due %s", due, m.StoredAt, m.ReceivedAt, m.DeliverAt)
			}
		})
	}
}

func TestProbeTellsRefusalsApart(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	topic, group := b.NewTopic(t, admin.Delay), b.NewGroup(t, 16)
	p := openProbe(t, realConfig(t, b))
	if _, err := p.TopicTypes(t.Context(), topic+"-no"); !IsNoTopic(err) {
		t.Errorf("no such topic: %v", err)
	}
	if _, err := p.Visit(t.Context(), group+"-no", topic); !IsNoGroup(err) {
		t.Errorf("no such group: %v", err)
	}
	v, err := p.Visit(t.Context(), group, topic)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Leave()
	if _, err := v.Send(t.Context(), "x", time.Now().Add(25*time.Hour)); !IsTooFar(err) {
		t.Errorf("25 hours ahead: %v", err)
	}
	secret := lapsetest.Start(t, lapsetest.WithCredentials("key", "secret"))
	secret.CreateTopic("topic", lapsetest.Delay, 8)
	if _, err := openProbe(t, Config{Endpoints: secret.Endpoint(), TLS: TLS{Disabled: true}}).TopicTypes(t.Context(), "topic"); !IsNoRight(err) {
		t.Errorf("no credentials: %v", err)
	}
}
