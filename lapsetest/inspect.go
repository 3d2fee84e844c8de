package lapsetest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

// Message is a message as the Broker has it. Its slices and maps are shared with
// the Broker: read only.
type Message struct {
	ID         string
	Topic      string
	Body       []byte
	Keys       []string
	Tag        string
	Properties map[string]string
	DeliverAt  time.Time // as asked for, in whole milliseconds; zero: at once
	BornAt     time.Time // by the sender's clock
	StoredAt   time.Time // by the Broker's clock
	Attempt    int       // deliveries so far; 0 where no group is meant
	Group      string    // of InFlight, Acked and DeadLetters
}

// CreateTopic makes a topic, or changes the type of one that is there; queues is 8
// if it is zero or less, and stays as it is for a topic that is there.
func (b *Broker) CreateTopic(name string, typ TopicType, queues int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if t, ok := b.topics[name]; ok {
		t.typ = typ
		return
	}
	if queues <= 0 {
		queues = defaultQueues
	}
	b.topics[name] = newTopic(name, typ, queues)
	b.noteChange()
}

// CreateGroup makes a consumer group whose messages are delivered up to retries+1
// times, or changes the retries of one that is there.
func (b *Broker) CreateGroup(name string, retries int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g, ok := b.groups[name]; ok {
		g.retries = retries
		return
	}
	b.groups[name] = &group{name: name, retries: retries}
	b.noteChange()
}

// Inject stores a message that no client could send: without any check of body,
// size or the topic's type. A zero deliverAt means at once. It returns the
// message's id, or an error if the topic is not there.
func (b *Broker) Inject(topic string, body []byte, deliverAt time.Time, keys ...string) (string, error) {
	return b.InjectMessage(Message{Topic: topic, Body: body, DeliverAt: deliverAt, Keys: keys})
}

// InjectMessage is Inject with everything that a message has. An empty ID gets a
// fresh one, a zero BornAt the present; StoredAt, Attempt and Group are not looked
// at.
func (b *Broker) InjectMessage(m Message) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, ok := b.topics[m.Topic]
	if !ok {
		return "", fmt.Errorf("inject message: no topic %q: create it first", m.Topic)
	}
	if m.ID == "" {
		m.ID = "INJECTED" + strconv.FormatInt(b.lastID+1, 10)
	}
	if m.BornAt.IsZero() {
		m.BornAt = b.now()
	}
	m.DeliverAt = m.DeliverAt.Truncate(time.Millisecond)
	m.Attempt, m.Group = 0, ""
	b.store(t, &message{Message: m, system: new(v2.SystemProperties)})
	return m.ID, nil
}

// Duplicate delivers messages once more, as a broker does after a crash: with the
// same id, and attempt 1. It takes the messages of these ids, or all of the topic
// if there are none, that have become due before, and returns how many.
func (b *Broker) Duplicate(topic string, ids ...string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, ok := b.topics[topic]
	if !ok {
		return 0
	}
	t.dispatch(b.now())
	var again []*message
	seen := make(map[int64]bool)
	for _, m := range t.log {
		if !seen[m.seq] && (len(ids) == 0 || slices.Contains(ids, m.ID)) {
			seen[m.seq] = true
			again = append(again, m)
		}
	}
	t.log = append(t.log, again...)
	b.noteVisible()
	return len(again)
}

// Sent returns the messages that were accepted for a topic, by whatever way, in
// the order of their arrival; "" means all topics.
func (b *Broker) Sent(topic string) []Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []Message
	for _, m := range b.accepted {
		if topic == "" || m.Topic == topic {
			out = append(out, m.Message)
		}
	}
	return out
}

// Pending returns the messages of a topic that are not due yet, soonest first.
func (b *Broker) Pending(topic string) []Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, ok := b.topics[topic]
	if !ok {
		return nil
	}
	t.dispatch(b.now())
	sorted := slices.SortedFunc(slices.Values(t.timers), func(a, z *message) int {
		if c := a.due.Compare(z.due); c != 0 {
			return c
		}
		return int(a.seq - z.seq)
	})
	var out []Message
	for _, m := range sorted {
		out = append(out, m.Message)
	}
	return out
}

// Ready returns how many messages of a topic a group could receive at this moment.
func (b *Broker) Ready(topic, group string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, g := b.topics[topic], b.groups[group]
	if t == nil || g == nil {
		return 0
	}
	now := b.now()
	t.dispatch(now)
	c := t.cursorOf(g)
	n := len(t.log) - c.pos
	for _, d := range c.hidden {
		if !d.visibleAt.After(now) {
			n++
		}
	}
	return n
}

// InFlight returns the messages that a group has received, has not acknowledged,
// and that are hidden at this moment.
func (b *Broker) InFlight(group string) []Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	var hidden []*delivery
	for _, t := range b.topics {
		if c := t.cursors[group]; c != nil {
			hidden = append(hidden, c.hidden...)
		}
	}
	slices.SortFunc(hidden, func(a, z *delivery) int { return int(a.id - z.id) })
	var out []Message
	for _, d := range hidden {
		if d.visibleAt.After(now) {
			out = append(out, d.view())
		}
	}
	return out
}

// Acked returns the messages that a group has acknowledged, in that order. A
// message that was delivered twice can be there twice.
func (b *Broker) Acked(group string) []Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g := b.groups[group]; g != nil {
		return slices.Clone(g.acked)
	}
	return nil
}

// DeadLetters returns the messages that were moved to a group's dead-letter topic,
// with the topic they came from, and the attempts they had.
func (b *Broker) DeadLetters(group string) []Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g := b.groups[group]; g != nil {
		return slices.Clone(g.dead)
	}
	return nil
}

// Calls returns how many requests of a method have come in, whatever was answered;
// for Telemetry it is the number of commands.
func (b *Broker) Calls(method string) int {
	mustKnow(method)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.calls[method]
}

// Clients returns the ids of the clients whose settings are known, sorted.
func (b *Broker) Clients() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.clients))
}

// Streams returns how many telemetry streams are open.
func (b *Broker) Streams() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.streams
}

// Conns returns how many connections are open.
func (b *Broker) Conns() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.conns)
}

// Now returns the Broker's time: real or its Clock's, with the skew.
func (b *Broker) Now() time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now()
}

// Until waits until cond is true, and returns ctx's error if that ends first. cond
// is called at once, and again after every call, message, acknowledgement, stream
// and step of the Clock; it may use the Broker. It is not called because real time
// passes.
func (b *Broker) Until(ctx context.Context, cond func() bool) error {
	for {
		b.mu.Lock()
		changed := b.changed
		b.mu.Unlock()
		if cond() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for a condition on the embedded broker: %w", context.Cause(ctx))
		}
	}
}
