package orders

import (
	"encoding/json"
	"fmt"
)

// OutgoingSchema identifies version 1 of the events: what [Outgoing.CloudEvent] writes, and docs/events-v1.schema.json describes. A change
// that breaks readers gets another version; members may be added to this one.
const OutgoingSchema = "https://github.com/lapse-orders/lapse/blob/main/docs/events-v1.schema.json"

// OutgoingContentType is that of an event in the structured mode of CloudEvents.
const OutgoingContentType = "application/cloudevents+json; charset=utf-8"

// cloudEvent has the attributes in the order in which a person reads them.
type cloudEvent struct {
	SpecVersion     string          `json:"specversion"`
	ID              string          `json:"id"`
	Source          string          `json:"source"`
	Type            string          `json:"type"`
	Subject         string          `json:"subject"`
	Time            string          `json:"time"`
	Sequence        string          `json:"sequence"`
	DataSchema      string          `json:"dataschema"`
	DataContentType string          `json:"datacontenttype"`
	Data            json.RawMessage `json:"data"`
}

// EventID tells the event from all others of the same source, and is the same however often it is sent: the order's id and the sequence.
func (e Outgoing) EventID() string { return fmt.Sprintf("%d-%d", e.OrderID, e.Sequence) }

// CloudEvent encodes the event as CloudEvents 1.0 JSON in structured mode. source is a URI reference that says whose events these are. The
// extension sequence has ten digits, since CloudEvents compares it as a text.
func (e Outgoing) CloudEvent(source string) ([]byte, error) {
	at := e.At
	body, err := json.Marshal(cloudEvent{
		SpecVersion: "1.0", ID: e.EventID(), Source: source, Type: e.Type, Subject: FormatID(e.OrderID), Time: *stamp(&at),
		Sequence: fmt.Sprintf("%010d", e.Sequence), DataSchema: OutgoingSchema, DataContentType: "application/json", Data: e.Data,
	})
	if err != nil {
		return nil, fmt.Errorf("encode event %s: %w", e.EventID(), err)
	}
	return body, nil
}
