package rmq

import (
	"testing"
	"time"
)

func TestTimedMessageIsSentReceivedAndAcknowledged(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p, c := b.producer(t), b.consumer(t)

	due := time.Now().Add(time.Second).Truncate(time.Millisecond).UTC()
	m := Message{
		Topic: b.topic, Body: []byte("body"), Keys: []string{"1", "2"}, DeliverAt: due,
		Properties: map[string]string{"traceparent": "00-aa-bb-01"},
	}
	id, err := p.Send(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	d := receiveOne(t, c, 10*time.Second)
	if early := time.Until(due); early > 0 {
		t.Errorf("received %s early", early)
	}
	if d.MessageID != id || d.Topic != b.topic || string(d.Body) != "body" || len(d.Keys) != 2 || d.Keys[1] != "2" ||
		d.Attempt != 1 || !d.DeliverAt.Equal(due) || d.Properties["traceparent"] != "00-aa-bb-01" || d.BornAt.IsZero() {
		t.Errorf("received %+v, want what was sent as %s, due %s", d, id, due)
	}
	if err := c.Ack(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if got := b.Acked(b.group); len(got) != 1 || got[0].ID != id {
		t.Errorf("acknowledged %+v, want %s", got, id)
	}
}
